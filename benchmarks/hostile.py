"""Hostile clients: does any of over 1,000 broken requests get a 5xx, hang, stall the server or cost a worker?

Values out of every range, types that do not fit, deep nesting, products of allowed numbers, bodies of 8 MB, bytes that
are hardly HTTP, and clients that leave, one to a connection (`tests/support/hostile_inputs.py`). Meanwhile a process of
its own asks for `/health` every 20 ms and notes the longest wait. At the end the same worker processes must be alive,
idle with their books in order, and give an honest client the answer they gave before.

Stands behind docs/security.md: no bytes of a client cost a worker, or another client its answer.

    python -m benchmarks.hostile

All traffic goes to the server that this starts on the loopback interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from benchmarks.common import (
    ONE_PAIR,
    Server,
    arguments,
    console,
    print_table,
    serving,
    until_idle,
    write_result,
)
from benchmarks.watch import HEALTH, MAX_HEALTH_S, Wait, Watched, longest_s, taken, watching
from tandem.loadtest.client import run_measured
from tests.support.hostile_inputs import HostileInput, Manner, describe, hostile_inputs

_ANSWER_S = 120.0  # several times the longest answer
_SILENCE_S = 45.0  # longest wait until a connection that says nothing is closed
_IDLE_TIMEOUT_S = 30.0  # once all clients are gone
_AT_ONCE = 8
_STALL_S = 0.05  # a shorter wait for /health is not reported
_STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3})")
_ERROR_IN_STREAM = re.compile(rb'^data: \{"error"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one input."""

    name: str
    status: int  # of the last answer on the connection; 0 = closed without one
    duration_s: float
    fault: str = ""  # why the server is at fault; "" = it is not


@dataclass(slots=True)
class Report:
    """The outcomes of all inputs."""

    outcomes: list[Outcome] = field(default_factory=list)
    stalls: list[tuple[float, str]] = field(default_factory=list)  # seconds, and what was being sent
    quiet_stall_s: float = 0.0  # longest wait for /health before anything was sent: the machine's own noise
    lost_workers: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # accounts that disagree, a normal answer that changed

    @property
    def faults(self) -> list[Outcome]:
        """Answers that a server must not give."""
        return [outcome for outcome in self.outcomes if outcome.fault]


def main() -> int:
    parser = arguments(__doc__)
    settings = parser.settings()
    step = 20 if settings.quick else 1
    with serving(ONE_PAIR, settings.model, "--max-model-len=1024") as server:
        report = run_measured(attack(server, settings.seed, step=step))
    _print(report)
    write_result("hostile", settings, asdict(report))
    has_stalled = not settings.quick and any(stall_s > MAX_HEALTH_S for stall_s, _ in report.stalls)
    return int(bool(report.faults or report.lost_workers or report.complaints or has_stalled))


async def attack(server: Server, seed: int, *, step: int = 1) -> Report:
    """Send every `step`-th input, first those that are sent side by side."""
    report = Report()
    workers, reference = await _workers(server), await _honest_answer(server)
    with watching(Watched(urlsplit(server.url).port or 0), HEALTH) as watch:
        await asyncio.sleep(2.0)
        report.quiet_stall_s = longest_s(taken(watch)[HEALTH])
        for is_heavy in (False, True):
            chosen = itertools.islice(hostile_inputs(server.model, seed), 0, None, step)
            inputs = (hostile for hostile in chosen if hostile.is_heavy == is_heavy)
            await _send_all(server, inputs, 1 if is_heavy else _AT_ONCE, report, watch)
    if await _honest_answer(server) != reference:
        report.complaints.append("an honest request is answered differently afterwards")
    after = await _workers(server)
    report.lost_workers = [
        f"{worker_id} (pid {pid})" for worker_id, pid in workers.items() if after.get(worker_id) != pid
    ]
    _, held = await until_idle(server, _IDLE_TIMEOUT_S)
    report.complaints += [f"{worker_id}: {wrong}" for worker_id, wrong in held.items()]
    return report


async def _send_all(
    server: Server, inputs: Iterator[HostileInput], at_once: int, report: Report, watch: Connection
) -> None:
    """Send them from `at_once` clients; each client sends its next input when the last is done."""
    spans: deque[_Span] = deque(maxlen=8 * at_once)  # the latest

    async def client() -> None:
        for hostile in inputs:
            span = _Span(hostile.name, time.monotonic())
            spans.append(span)
            report.outcomes.append(await _send(server.url, hostile))
            span.ended_s = time.monotonic()
            note_stalls()

    def note_stalls() -> None:
        for wait in taken(watch)[HEALTH]:
            if wait.waited_s > _STALL_S or wait.is_lost:
                names = [span.name for span in spans if span.overlaps(wait)]
                report.stalls.append((wait.waited_s, ", ".join(names)))

    await asyncio.gather(*(client() for _ in range(at_once)))
    await asyncio.sleep(1.0)  # for work the last inputs left behind
    note_stalls()


@dataclass(slots=True)
class _Span:
    """When one input was under way."""

    name: str
    began_s: float
    ended_s: float = math.inf

    def overlaps(self, wait: Wait) -> bool:
        """Whether it was under way during this wait."""
        return self.began_s < wait.began_s + wait.waited_s and self.ended_s > wait.began_s


async def _send(url: str, hostile: HostileInput) -> Outcome:
    """Send one input on a connection of its own, and judge what comes back."""
    parts = urlsplit(url)
    began = time.monotonic()
    limit_s = _SILENCE_S if hostile.manner in (Manner.SILENT, Manner.SLOW) else _ANSWER_S
    answer = b""
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**26)
            try:
                answer = await _converse(reader, writer, hostile)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return Outcome(hostile.name, 0, time.monotonic() - began, f"no end within {limit_s:.0f} s")
    except ConnectionError:
        pass  # the server closed the connection, a fair answer to most inputs
    return Outcome(hostile.name, *_judge(answer, time.monotonic() - began, hostile))


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hostile: HostileInput) -> bytes:
    match hostile.manner:
        case Manner.SLOW:
            for byte in hostile.data:
                writer.write(bytes((byte,)))
                await asyncio.sleep(0.1)  # part of the input: one byte at a time
                if reader.at_eof() or writer.is_closing():
                    break
        case Manner.LEAVE:
            writer.write(hostile.data)
            return b""
        case Manner.RESET:
            writer.write(hostile.data)
            return await reader.read(200)
        case Manner.HALF_CLOSE:
            writer.write(hostile.data)
            writer.write_eof()
        case Manner.WHOLE | Manner.SILENT:
            writer.write(hostile.data)
    answer = bytearray()
    with contextlib.suppress(ConnectionError):  # bytes received before a reset count
        while data := await reader.read(2**20):
            answer += data
    return bytes(answer)


def _judge(answer: bytes, duration_s: float, hostile: HostileInput) -> tuple[int, float, str]:
    match = _STATUS.match(answer)
    status = int(match[1]) if match else 0
    if status >= 500 and status != 501:  # that says that no model of this kind is served
        return status, duration_s, f"status {status}: {answer[-300:].decode(errors='replace')}"
    if status == 200 and _ERROR_IN_STREAM.search(answer) and b'"server_error"' in answer:
        return status, duration_s, f"an error within the stream: {answer[-300:].decode(errors='replace')}"
    expects_answer = hostile.manner is Manner.WHOLE
    if status == 0 and expects_answer and not hostile.is_heavy:  # after a heavy input the reset may overtake the answer
        return status, duration_s, "closed without an answer"
    return status, duration_s, ""


async def _workers(server: Server) -> dict[str, int]:
    """Process ids by worker: a worker that was replaced has another one."""
    return {worker["worker_id"]: worker["pid"] for worker in await server.workers()}


async def _honest_answer(server: Server) -> str:
    body = {"model": server.model, "prompt": "One, two, three,", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer: str = (await server.client.request_json("POST", "/v1/completions", body))["choices"][0]["text"]
    return answer


def _print(report: Report) -> None:
    by_status = Counter(outcome.status for outcome in report.outcomes)
    longest = max(report.outcomes, key=lambda outcome: outcome.duration_s)
    stall_s, during = max(report.stalls, default=(0.0, "nothing"))
    rows: Sequence[Sequence[object]] = [
        ["inputs", len(report.outcomes), str(describe([outcome.name for outcome in report.outcomes]))],
        ["answers by status", len(by_status), str(dict(sorted(by_status.items())))],
        ["faults (5xx, hang, no answer)", len(report.faults), ""],
        ["longest answer, s", longest.duration_s, longest.name],
        ["longest wait for /health, s", stall_s, during],
        ["the same before the attack, s", report.quiet_stall_s, ""],
        ["workers lost", len(report.lost_workers), ", ".join(report.lost_workers)],
        ["other complaints", len(report.complaints), "; ".join(report.complaints)],
    ]
    print_table("Hostile clients", ["what", "number", "which"], rows)
    for outcome in report.faults[:40]:
        console.print(f"{outcome.name} ({outcome.duration_s:.1f} s): {outcome.fault}", markup=False, soft_wrap=True)
    for seconds, names in sorted(report.stalls, reverse=True)[:10]:
        console.print(f"/health waited {seconds:.2f} s beside {names}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
