"""Streams of `tandem route` that go on on another engine: the silence after `kill -9`, and the cost when nothing fails.

    python -m benchmarks.stream_moves [--parts relay,cost] [--vllm-python PATH] [--vllm-eager]

Relay: CPU time of what the router does with one event of a stream, with and without token ids. Cost: two
`tandem route` in front of engines that compute nothing, one with --max-moves 0, which asks for no token ids. They take
turns; the figure is CPU seconds of the router for a chunk. Kill: two vLLM servers (with --vllm-python), of which one is
killed under greedy streams. Their texts are compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httpx
import orjson
import psutil

from benchmarks.common import arguments, console, print_table, write_result
from benchmarks.edge import SHAPES, route_cpu_in_turn
from benchmarks.engines import Fleet, routed
from tandem.frontend.relay.sse import ChunkEvents
from tandem.frontend.relay.stream_ledger import StreamLedger
from tandem.frontend.relay.stream_relay import Rewrite, StreamRelay
from tandem.router.engines.upstream import Reply

__all__ = ["Seen", "kill_under_load", "main"]

_NAMES = ("max_moves 0", "max_moves 3")
_STORY = "Tell a story about {} boats, with emojis and umlauts: ä, ö, 🙂."


@dataclass
class Seen:
    """What the client of one stream saw."""

    text: str = ""
    usage: tuple[int, int] = (0, 0)  # prompt, answer
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    ids: set[str] = field(default_factory=set)
    engine: str = ""
    times_s: list[float] = field(default_factory=list)  # of its events
    after_kill_s: float | None = None  # from the kill to its next event; None = its engine lived

    @property
    def answer(self) -> tuple[Any, ...]:
        """All that must not depend on the kill."""
        return self.text, self.usage, self.finish_reason, self.error


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--parts", default="relay,cost", help="some of relay,cost (default: %(default)s)")
    parser.add_argument("--vllm-python", metavar="PATH", default="", help="Python of an environment with vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--rounds", type=int, default=7, help="of turns and of kills (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="under the kill (default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, default=128)
    settings = parser.parse_args()
    if settings.quick:
        settings.rounds, settings.seconds, settings.output_tokens = 1, 0.3, 32
    parts, results = settings.parts.split(","), dict[str, Any]()
    if "relay" in parts:
        results["relay"] = measure_relay()
        rows = [[name, value] for name, value in results["relay"].items()]
        print_table("The relay's work for one event", ["", "CPU us"], rows, "best of 7 runs")
    if "cost" in parts:
        results["cost"] = measure_cost(settings)
        _show_cost(results["cost"], settings.rounds)
    if settings.vllm_python:
        results["kill"] = measure_kill(settings)
        console.print(results["kill"])
    write_result("stream_moves", settings, results)
    return 0


def measure_relay() -> dict[str, float]:
    """CPU microseconds for one event, which usually comes alone."""
    plain, with_ids = _event(None), _event([12345])
    ledger = StreamLedger(is_chat=True, shows_ids=False, shows_running_usage=False)
    ledger.follow(plain)
    bare, followed = _relay(None), _relay(ledger.follow)
    found = {
        "without token ids": _cpu_us(partial(bare.visible, plain), 20_000),
        "with token ids": _cpu_us(partial(followed.visible, with_ids), 20_000),
    }
    found["without token ids, 16 at once"] = _cpu_us(partial(bare.visible, plain * 16), 2_000) / 16
    found["with token ids, 16 at once"] = _cpu_us(partial(followed.visible, with_ids * 16), 2_000) / 16
    for num in (4_000, 100_000):
        first = _event([12345], prompt_token_ids=list(range(num)))
        found[f"the first one, with a prompt of {num:,} ids"] = _cpu_us(partial(followed.visible, first), 10)
    return found


def _relay(rewrite: Rewrite | None) -> StreamRelay:
    reply = Reply(cast(Any, None))
    return StreamRelay("a", reply, _NoObserver(), ChunkEvents(), shows_usage=False, rewrite=rewrite)


class _NoObserver:
    def saw_tokens(self, count: int) -> None:
        pass

    def saw_usage(self, usage: dict[str, Any], *, is_total: bool) -> None:
        pass

    def held(self, *, is_held: bool) -> None:
        pass

    def ended(self) -> None:
        pass


def _event(token_ids: list[int] | None, **fields: Any) -> bytes:
    body = {"id": f"chatcmpl-{'0123456789abcdef' * 2}", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    choices = [choice | {"token_ids": token_ids}]
    return b"data: " + orjson.dumps(body | {"choices": choices} | fields) + b"\n\n"


def _cpu_us(work: Callable[[], object], num: int) -> float:
    def once() -> float:
        started_s = time.process_time()
        for _ in range(num):
            work()
        return (time.process_time() - started_s) / num

    return min(once() for _ in range(7)) * 1e6


def _show_cost(cost: dict[str, dict[str, list[float]]], num_rounds: int) -> None:
    rows = []
    for name, turns in cost.items():
        ratios = sorted(on / off for off, on in zip(*turns.values(), strict=True))
        noise = f"{ratios[len(ratios) // 4]:.3f}-{ratios[-1 - len(ratios) // 4]:.3f}"
        medians = [statistics.median(values) * 1e6 for values in turns.values()]
        rows.append([name, *medians, f"{statistics.median(ratios):.3f}", noise])
    headings = ["", *_NAMES, "ratio", "noise"]
    print_table("Router CPU for a chunk, us", headings, rows, f"{num_rounds} rounds in turn")


def measure_cost(settings: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """CPU seconds of the router for a chunk in each turn, by shape, without and with token ids."""
    flags = {name: [f"--max-moves={name[-1]}"] for name in _NAMES}
    shapes = [shape for shape in SHAPES if shape.is_stream]
    return route_cpu_in_turn(flags, shapes, settings.rounds, settings.seconds, kind="vllm")


def measure_kill(settings: argparse.Namespace) -> dict[str, Any]:
    """Silences after `kill -9` of a vLLM server, over some rounds with servers of their own."""
    pauses_s: list[float] = []
    num_wrong = num_failed = 0
    for _ in range(settings.rounds):
        with routed(settings, ("a", "b")) as fleet:
            before = asyncio.run(kill_under_load(fleet, settings.streams, settings.output_tokens))
            after = asyncio.run(kill_under_load(fleet, settings.streams, settings.output_tokens, victim="a"))
        num_failed += sum(seen.error is not None for seen in after)
        num_wrong += sum(one.answer != other.answer for one, other in zip(before, after, strict=True))
        pauses_s += [seen.after_kill_s for seen in after if seen.after_kill_s is not None]
    return {
        "num_moved": len(pauses_s),
        "num_failed": num_failed,
        "num_other_answers": num_wrong,
        "silence_p50_s": statistics.median(pauses_s),
        "silence_max_s": max(pauses_s),
    }


async def kill_under_load(fleet: Fleet, num_streams: int, num_tokens: int, *, victim: str = "") -> list[Seen]:
    """What the clients saw. The victim is killed once each stream has shown a part of its answer."""
    started = [asyncio.Event() for _ in range(num_streams)]
    seen = [Seen() for _ in range(num_streams)]
    async with httpx.AsyncClient(base_url=fleet.router_url, timeout=300) as client:
        streams = [
            asyncio.create_task(_one_stream(client, fleet.model, i, num_tokens, seen[i], started[i]))
            for i in range(num_streams)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        killed_s = time.monotonic()
        if victim:
            server = psutil.Process(fleet.pids[victim])
            for process in [*server.children(recursive=True), server]:
                process.send_signal(signal.SIGKILL)
        await asyncio.gather(*streams)
    for one in seen:
        later = [at_s for at_s in one.times_s if at_s > killed_s]
        if victim and one.engine == victim and later:
            one.after_kill_s = max(b - a for a, b in zip([killed_s, *later], later, strict=False))
    return seen


async def _one_stream(
    client: httpx.AsyncClient, model: str, number: int, num_tokens: int, seen: Seen, started: asyncio.Event
) -> None:
    """A greedy stream: half of them are chats, and half have a stop string that never comes."""
    text = _STORY.format(number)
    body: dict[str, Any] = {"model": model, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body |= {"stop": ["never to be seen"]} if number % 4 < 2 else {"min_tokens": num_tokens}
    body |= {"messages": [{"role": "user", "content": text}]} if number % 2 else {"prompt": text}
    body |= {"stream_options": {"include_usage": True}}
    async with client.stream("POST", f"/v1/{'chat/' * (number % 2)}completions", json=body) as response:
        seen.engine = response.headers.get("x-tandem-engine", "")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            seen.times_s.append(time.monotonic())
            _note(seen, orjson.loads(line[6:]))
            if len(seen.times_s) == min(10, num_tokens // 2):
                started.set()
    started.set()


def _note(seen: Seen, event: dict[str, Any]) -> None:
    seen.error = seen.error or event.get("error")
    if "id" in event:
        seen.ids.add(event["id"])
    if usage := event.get("usage"):
        seen.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        seen.text += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
        seen.finish_reason = choice["finish_reason"] or seen.finish_reason


if __name__ == "__main__":
    sys.exit(main())
