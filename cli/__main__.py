"""`python -m cli` is the `tandem` command."""

from cli.main import main

main()
