"""`tandem model`: fetch models before they are served."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tandem.cluster.model_store import resolve_model
from tandem.protocol.config import DEFAULT_MODEL

app = typer.Typer(help="Fetch models.", no_args_is_help=True, rich_markup_mode="rich")


@app.callback()
def _model() -> None:
    """Fetch models before they are served."""


@app.command()
def pull(
    name: Annotated[
        str, typer.Argument(help="Built-in name, hub id (org/name), or a local folder, which is only checked.")
    ] = DEFAULT_MODEL,
) -> int:
    """Fetch a model, convert it if needed, and print its folder.

    The built-in model is kept under TANDEM_CACHE (default ~/.cache/tandem), hub models in the hub's own cache. The
    command may be interrupted, and may run twice at once.

    [bold]Examples[/bold]

    [cyan]tandem model pull[/cyan]

    [cyan]tandem model pull Qwen/Qwen3-0.6B[/cyan]
    """
    console = Console(stderr=True, highlight=False)
    with console.status(f"model {escape(name)}"):
        folder = resolve_model(name, report=lambda line: console.print(f"  {line}", markup=False, soft_wrap=True))
    typer.echo(str(folder))
    return 0
