"""`tandem route` from a config to a clean exit: the router in front of engines, in one process and with no workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from rich.console import Console

from protocol.config import RouterConfig
from protocol.errors import ConfigError
from router.cost_model import CostModel
from router.engines.app import create_engines_app
from router.engines.config import EnginesConfig, FleetFile
from router.engines.fleet import Fleet
from router.engines.prompts import PromptReader, TokenReader
from router.prefix_index import PrefixIndex
from router.registry import Registry
from router.tokenizer import Tokenizer

__all__ = ["serve_engines", "token_readers"]

logger = logging.getLogger(__name__)


def serve_engines(
    fleet_file: FleetFile, router: RouterConfig, engines: EnginesConfig, admin_token: str, listener: socket.socket
) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. Raises `ConfigError` for what the user can mend."""
    readers = token_readers(fleet_file.tokenizers)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(fleet_file, readers, router, engines, admin_token, listener))


def token_readers(tokenizers: dict[str, str]) -> dict[str, PromptReader]:
    """A reader for each model whose tokenizer is given. Raises `ConfigError` for one that cannot be loaded."""
    readers: dict[str, PromptReader] = {}
    for model, folder in tokenizers.items():
        try:
            readers[model] = TokenReader(Tokenizer(folder))
        except (OSError, ValueError) as exc:
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            raise ConfigError(f"tokenizers: {model!r} = {folder!r} cannot be loaded: {reason}") from exc
    return readers


async def _serve(
    fleet_file: FleetFile,
    readers: dict[str, PromptReader],
    router: RouterConfig,
    engines: EnginesConfig,
    admin_token: str,
    listener: socket.socket,
) -> int:
    fleet = Fleet(registry=Registry(), index=PrefixIndex(), costs=CostModel(), config=router, engines=engines)
    app = create_engines_app(fleet, fleet_file.engines, readers, CollectorRegistry(), admin_token=admin_token)
    host, port = listener.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    server = _Server(
        uvicorn.Config(
            app,
            host=router.host,
            port=router.port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(router.drain_timeout_s)),
        ),
        f"Routing to {len(fleet_file.engines)} engine(s) on {where}  (Ctrl-C stops it)",
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    await server.serve(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal instead of an exit code."""

    def __init__(self, config: uvicorn.Config, welcome: str) -> None:
        super().__init__(config)
        self._welcome = welcome

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so once it is true."""
        await super().startup(sockets)
        if self.started:
            Console(stderr=True, highlight=False).print(self._welcome)

    def stop(self) -> None:
        """Accept nothing more and let answers end; the second time, end now."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
