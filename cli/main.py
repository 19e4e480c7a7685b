"""The `tandem` command: collects the commands, and turns every expected error into one line and an exit code."""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer import rich_utils

from tandem.cli import bench, chaos, chat, keys, model, plan, replay, route, serve, top, version, workers
from tandem.cli.options import printable
from tandem.protocol.errors import ServingError
from tandem.protocol.settings import rule_of
from tandem.runtime.no_torch import keep_torch_out
from tandem.runtime.signals import restore_child_signals

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
_MAX_MESSAGE = 1500  # characters
SETTINGS = {field.name: field for field in (*serve.SERVE_FIELDS, *route.ROUTE_FIELDS)}
# Short names of flags. As second names of their options they would take the width that the help needs on a terminal.
ALIASES = {
    field.setting.short.lstrip("-"): field.flag.lstrip("-") for field in SETTINGS.values() if field.setting.short
}

# Narrower than typer's own, for the same reason: its tables shorten a flag that does not fit into 80 columns.
rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment]

app = typer.Typer(
    name="tandem",
    help="Serve large language models with prefill and decode on separate workers.\n\n"
    "Start with [bold]tandem serve[/bold]; then [bold]tandem chat[/bold] in a second terminal.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
    },
)


@app.callback()
def tandem(
    _: Annotated[
        bool,
        typer.Option("--version", help="Same as tandem version.", callback=version.print_and_leave, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""


def _alias_settings(command: Callable[..., int]) -> dict[str, Any]:
    """What makes a command know the short names. It would take arguments for them too, so not where no flag has one."""
    has_short = {name for name, field in SETTINGS.items() if field.setting.short}
    if has_short.isdisjoint(inspect.signature(command).parameters):
        return {}
    return {"token_normalize_func": lambda token: ALIASES.get(token, token)}


def _paragraphs(command: Callable[..., int]) -> str:
    """The command's docstring with each paragraph on one line: the help is as wide as the terminal, not the source."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")


COMMANDS = (
    serve.serve,
    route.route,
    chat.chat,
    top.top,
    workers.drain,
    workers.restart,
    workers.add,
    bench.bench,
    plan.plan,
    replay.replay,
    chaos.chaos,
)
for command in COMMANDS:
    app.command(help=_paragraphs(command), context_settings=_alias_settings(command))(command)
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
app.command()(version.version)


def main() -> None:
    """Entry point of the `tandem` command."""
    restore_child_signals()
    keep_torch_out()  # workers, which need it, are other processes
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run the command with these arguments. Exit codes: 0 = done, 2 = the user's error (one line on stderr)."""
    try:
        code = app(list(args), prog_name="tandem", standalone_mode=False)
    except typer.BadParameter as exc:
        _complain(f"{_wrong_value(exc)}. See: {_help_of(exc, args)}")
        return EXIT_USER_ERROR
    except typer.TyperException as exc:
        message = _no_such_option(exc) or _in_one_line(exc)
        if message:
            end = "" if message.endswith("?") else "."
            _complain(f"{message.rstrip('.')}{end} See: {_help_of(exc, args)}")
        return EXIT_USER_ERROR
    except ServingError as exc:
        _complain(exc.message)
        return EXIT_USER_ERROR
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return int(code or 0)


def _complain(message: str) -> None:
    """Write one line of bounded length, whatever a user's file or flag has put into the message."""
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE * 2 // 3]} ... {message[-_MAX_MESSAGE // 3 :]}"
    sys.stderr.write(f"tandem: {printable(message)}\n")


def _wrong_value(error: typer.BadParameter) -> str:
    """What is wrong with the value of a flag; for a setting, in the same words as for its value in a file."""
    errors = getattr(error.__cause__, "errors", None)  # pydantic's, which typer uses; only they have the value
    if error.param is None or errors is None:
        return _in_one_line(error).rstrip(".")
    name, value = error.param.name or "", errors()[0]["input"]
    if name in SETTINGS:
        return f"{name}={value!r} must be {rule_of(SETTINGS[name], value)}"
    return f"{name}={value!r}: {error.message.removeprefix('Value error, ').rstrip('.')}"


def _no_such_option(error: typer.TyperException) -> str:
    """What is wrong with a flag that the command does not have; "" for other errors. Short names are offered too."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not isinstance(name, str) or getattr(error, "possibilities", None) is None or context is None:
        return ""
    options = (flag for param in context.command.params for flag in (*param.opts, *param.secondary_opts))
    flags = {flag.lstrip("-") for flag in options}
    flags |= {alias for alias, flag in ALIASES.items() if flag in flags}
    close = difflib.get_close_matches(name.lstrip("-"), sorted(flags), n=2, cutoff=0.7)
    meant = f"; did you mean {' or '.join(f'--{flag}' for flag in close)}?" if close else ""
    return f"No such option: {name}{meant}"


def _in_one_line(error: typer.TyperException) -> str:
    return " ".join(error.format_message().split())


def _help_of(error: typer.TyperException, args: Sequence[str]) -> str:
    """The command whose help tells more. A flag without its value does not tell its command."""
    context = getattr(error, "ctx", None)
    if context is not None:
        return f"{context.command_path} --help"
    return " ".join(["tandem", *itertools.takewhile(lambda word: not word.startswith("-"), args), "--help"])
