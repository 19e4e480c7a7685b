"""The frontend processes of a server. The process that decides starts, replaces and stops them.

They share the port: the kernel spreads connections over them. The parent's own socket is bound and never listens. It
keeps the port while a process is replaced, and keeps other programs from sharing it by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes.child import FrontendSettings, RouteFrontend, ServeFrontend
from tandem.frontend.processes.deciding_process import DecidingProcess, DecidingService
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.runtime.process_group import ProcessGroup
from tandem.runtime.temporary_folder import make_temporary_folder
from tandem.scheduling.admission.tenants import Tenants


@contextlib.asynccontextmanager
async def frontend_processes(
    service: DecidingService,
    frontend: ServeFrontend | RouteFrontend,
    *,
    config: RouterConfig,
    listener: socket.socket,
    api_keys: ApiKeys,
    tenants: Tenants = Tenants(),
    admin_token: str = "",
) -> AsyncIterator[FrontendProcesses]:
    """Run `config.router_processes` of them while the block runs. Each serves once it has joined this process.

    Raises `ConfigError` when the socket, or the folder that it is in, cannot be made.
    """
    # Only this user may enter the folder: a process that can write to the socket can generate, and add engines.
    folder = make_temporary_folder()
    with contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        endpoint = f"{folder}/deciding"
        deciding = DecidingProcess(service, endpoint, api_keys)
        # Only now: the bind before must fail if another program has the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        settings = FrontendSettings(
            frontend_id="",
            number=0,
            endpoint=endpoint,
            frontend=frontend,
            port=listener.getsockname()[1],
            router=config,
            metrics_folder=folder,
            started_at_s=int(time.time()),
            needs_key=api_keys.is_required,
            tenants=tenants,
            admin_token=admin_token,
        )
        try:
            await deciding.start()
        except OSError as exc:
            raise ConfigError(
                f"the socket {endpoint} cannot be created: {exc}; set TMPDIR to a local folder with a shorter name"
            ) from exc
        processes = FrontendProcesses(deciding, settings)
        try:
            yield processes
        finally:
            await processes.close()
            await deciding.close()


class FrontendProcesses:
    """Runs `router_processes` frontend processes. Those that end or hang are replaced, until `drain`."""

    def __init__(self, deciding: DecidingProcess, settings: FrontendSettings) -> None:
        self.has_started = asyncio.Event()  # set once all of them serve
        self.deciding = deciding
        self.metrics_folder = settings.metrics_folder
        self._settings = settings
        self._frontend_ids: dict[int, str] = {}  # by number; each start gets a new id
        self._num_started = 0
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()
        self.group = ProcessGroup(
            "tandem.frontend.processes.child",
            self._setup,
            settings.router.router_processes,
            stop_timeout_s=settings.longest_drain_s,
            silence_timeout_s=settings.router.worker_timeout_s,
            on_ended=self._ended,
        )
        self.serving = asyncio.create_task(self.group.run(self._stop, self._stop_now, self._ready))

    @property
    def num_running(self) -> int:
        """Requests that are served for clients."""
        return self.deciding.num_running

    @property
    def is_serving(self) -> bool:
        """Whether all of them have begun to serve."""
        return self.has_started.is_set()

    def leave(self) -> None:
        """Go on, but answer `/ready` with 503, and let no connection be used again."""
        self.group.leave()

    def drain(self) -> None:
        """Accept nothing more, let running answers end, then end the processes."""
        self._stop.set()

    async def close(self) -> None:
        """End the processes now."""
        self._stop.set()
        self._stop_now.set()
        await asyncio.gather(self.serving, return_exceptions=True)

    def _ready(self) -> None:
        self.has_started.set()

    def _setup(self, number: int) -> bytes:
        self._num_started += 1
        frontend_id = self._frontend_ids[number] = f"frontend-{number}-{self._num_started}"
        self.deciding.expect(frontend_id)
        return msgspec.json.encode(replace(self._settings, frontend_id=frontend_id, number=number))

    def _ended(self, number: int) -> None:
        """Cancel its requests. The process that replaces it takes over its counters, but not its gauges."""
        self.deciding.drop(self._frontend_ids.pop(number))
        for path in Path(self.metrics_folder).glob(f"gauge_live*_{number}.db"):
            path.unlink(missing_ok=True)
