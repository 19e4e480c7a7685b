"""Takes the `tandem` commands out of shell text, and asks the command line whether it would accept them."""

import re
import shlex

import typer.main

from tandem.cli.main import app


def tandem_commands(shell: str) -> list[list[str]]:
    """Arguments of every tandem command in this text."""
    commands = []
    for line in shell.replace("\\\n", " ").splitlines():
        match = re.search(r"(?:^|[\s/])tandem ((?:serve|model pull)\b.*)", line)
        if match:
            text = re.split(r"\s(?:>|2>|<|&|\|)", f"{match[1]} ")[0]
            commands.append(shlex.split(text))
    return commands


def accept(args: list[str]) -> dict[str, object]:
    """Parsed parameters of the command; raises what the command line would for a flag it does not know."""
    group = typer.main.get_command(app)
    context = group.make_context("tandem", list(args))
    command, rest = group, list(args)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
        context = command.make_context(command.name, list(rest), parent=context)
    return dict(context.params)
