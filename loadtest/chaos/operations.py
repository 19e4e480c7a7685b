"""Does what operators do to the workers of a running server, through its HTTP routes and by SIGTERM."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import httpx

from tandem.loadtest.chaos.plan import ChaosEvent
from tandem.loadtest.chaos.server import TrialServer, TrialWorker, chosen, has_ended

Json = dict[str, Any]

_POLL_S = 0.2
_END_S = 240.0  # for a departure and a start, which may be tried again with growing delays
_REFUSED_S = 60.0  # how long to ask again while other things happen to the workers
_REFUSED = (404, 409)  # the worker is gone, or the server has a rule against it now


class OperationRefused(Exception):
    """By a rule of the server, or of the trial; nothing is lost."""


class OperationFailed(Exception):
    """It was begun, and did not end as it should."""


class Operations:
    """All operations of one trial."""

    def __init__(self, server: TrialServer) -> None:
        self._server = server
        self._under_way: set[str] = set()  # kinds of which there is one at a time

    async def do(self, event: ChaosEvent) -> str:
        """Do one and wait for its end; what it was. Raises `OperationRefused` or `OperationFailed`."""
        try:
            match event.kind:
                case "flip":
                    return await self._flip(event.drawn)
                case "migrate":
                    return await self._migrate(event.drawn)
                case "restart":
                    worker = await self._depart(event.drawn, restart=True)
                    return f"{worker} was restarted"
                case "terminate":
                    return await self._terminate(event.drawn)
                case "rolling-restart":
                    return await self._alone(event.kind, self._roll())
                case _:
                    return await self._alone(event.kind, self._replace(event.drawn))
        except httpx.HTTPError as exc:
            if self._server.has_broken_connections:
                raise OperationRefused("its router process died with the connection") from exc
            raise OperationFailed(f"{type(exc).__name__}: {exc}") from exc

    async def _flip(self, drawn: float) -> str:
        worker: TrialWorker | None = chosen(await self._serving(), drawn)
        if worker is None:
            raise OperationRefused("no worker serves")
        role = "prefill" if worker.role == "decode" else "decode"
        await self._post("/v1/pools/roles", {"worker": worker.name, "role": role}, worker)
        return f"{worker.name} serves as {role}"

    async def _migrate(self, drawn: float) -> str:
        """Let all answers of a worker move. One that decodes is preferred."""
        workers = await self._serving()
        worker = chosen([one for one in workers if one.role != "prefill"] or workers, drawn)
        if worker is None:
            raise OperationRefused("no worker serves")
        moves = await self._post("/v1/pools/migrate", {"worker": worker.name}, worker)
        return f"{len(moves['moving'])} answers leave {worker.name}, {len(moves['staying'])} stay"

    async def _depart(self, drawn: float, *, restart: bool, name: str = "") -> str:
        """Let a worker leave, and come back if it is restarted; its name."""
        async with self._server.choosing:
            worker = await self._victim(drawn, name)
            body = {"worker": worker.name, "restart": restart}
            departure = await self._post("/v1/pools/drain", body, worker)
            self._server.mark(worker.process, is_down=True)
        end = "back_after_s" if restart else "left_after_s"
        await self._until("departures", "id", departure["id"], end)
        return worker.name

    async def _terminate(self, drawn: float) -> str:
        async with self._server.choosing:
            worker = await self._victim(drawn)
            self._server.mark(worker.process, is_down=True)
            worker.process.terminate()
        deadline_s = time.monotonic() + _END_S
        while not has_ended(worker.process):
            if time.monotonic() > deadline_s:
                raise OperationFailed(f"{worker.name} did not end within {_END_S:g} s after SIGTERM")
            await asyncio.sleep(_POLL_S)
        return f"{worker.name} ended after SIGTERM"

    async def _alone(self, kind: str, work: Coroutine[None, None, str]) -> str:
        """Do it unless one of its kind goes on."""
        if kind in self._under_way:
            work.close()
            raise OperationRefused("the one before goes on")
        self._under_way.add(kind)
        try:
            return await work
        finally:
            self._under_way.discard(kind)

    async def _roll(self) -> str:
        """Restart all present workers, one after the other."""
        done = [name for name in await self._names() if await self._is_restarted(name)]
        return f"restarted in turn: {', '.join(done) or 'none'}"

    async def _names(self) -> list[str]:
        return [worker.name for worker in await self._server.workers()]

    async def _is_restarted(self, name: str) -> bool:
        """Restart a worker, unless it has left for good meanwhile."""
        try:
            await self._persist(partial(self._depart, 0.0, restart=True, name=name))
        except OperationRefused:
            return False
        return True

    async def _replace(self, drawn: float) -> str:
        """Add a worker of either role, and drain one of all once it serves."""
        role, drained = random.Random(drawn).choice(["prefill", "decode"]), random.Random(drawn).random()
        arrival = await self._post("/v1/pools/add", {"role": role})
        record = await self._until("arrivals", "worker", arrival["worker"], "serving_after_s", "withdrawn")
        if "withdrawn" in record:
            raise OperationRefused(f"{arrival['worker']} was withdrawn: {record['withdrawn']}")
        gone = await self._persist(lambda: self._depart(drained, restart=False))
        return f"{arrival['worker']} joined and {gone} left"

    async def _persist(self, depart: Callable[[], Awaitable[str]]) -> str:
        """Let a worker leave, and ask again for a while where that is refused."""
        deadline_s = time.monotonic() + _REFUSED_S
        while True:
            try:
                return await depart()
            except OperationRefused:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(_POLL_S)

    async def _serving(self) -> list[TrialWorker]:
        return [worker for worker in await self._server.workers() if self._server.serves(worker)]

    async def _victim(self, drawn: float, name: str = "") -> TrialWorker:
        """A worker that may leave, since another one serves: any, or that of a name."""
        workers = await self._server.workers()
        serving = [one for one in workers if self._server.serves(one) and name in ("", one.name)]
        worker: TrialWorker | None = chosen(serving, drawn)
        if worker is None or not self._server.leaves_another(worker, workers):
            raise OperationRefused(f"{name or 'a worker'} does not serve, or no other one does")
        return worker

    async def _post(self, path: str, body: Json, worker: TrialWorker | None = None) -> Json:
        """Ask the server for something, of which this worker may die meanwhile."""
        response = await self._server.client.post(path, json=body)
        answer: Json = response.json()
        if response.status_code == 200:
            return answer
        error = f"HTTP {response.status_code}: {answer['error']['message']}"
        if response.status_code in _REFUSED or (worker is not None and not self._server.serves(worker)):
            raise OperationRefused(error)
        raise OperationFailed(f"{path} {body}: {error}")

    async def _until(self, records: str, field: str, value: object, *ends: str) -> Json:
        """Wait until the server tells one of these ends of a departure or an arrival."""
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            for record in (await self._server.pools())["autoscaler"][records]:
                if record[field] == value and any(end in record for end in ends):
                    return dict(record)
            await asyncio.sleep(_POLL_S)
        raise OperationFailed(f"nothing of {' or '.join(ends)} in {records} of {value} within {_END_S:g} s")
