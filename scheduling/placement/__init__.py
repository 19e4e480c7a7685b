"""Where a request goes: predicted cost of every candidate, from what workers have cached and how busy they are."""
