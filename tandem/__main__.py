"""`python -m tandem` is the `tandem` command."""

from tandem.cli.main import main

main()
