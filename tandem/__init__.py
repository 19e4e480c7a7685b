"""The one import root: `tandem.router` is the folder `router/`, linked from here, and so on."""
