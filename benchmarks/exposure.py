"""The exposed part of the KV transfer: how long a client waits between the first token and the decode worker's first.

One request at a time, always on a pair of workers. The first token comes from the prefill worker; the second from the
decode worker, once it holds the KV. Exposed is the gap between the two less one decode step (the median gap of the
rest of that stream), as a share of TTFT. Transfers that overlap the prefill are invisible to the client, by design.

Stands behind README's "KV transfer that a client waits for".

    python -m benchmarks.exposure
    UCX_TLS=tcp python -m benchmarks.exposure --wire-codecs raw exact auto    # over a slow link
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from benchmarks.common import ONE_PAIR_ALWAYS, Server, arguments, in_ms, print_rows, serving, write_result
from tandem.loadtest.client import StreamTiming, run_measured
from tandem.loadtest.stats import Distribution


def main() -> None:
    parser = arguments(__doc__)
    parser.option("--prompt-tokens", [512, 2000, 6000], quick=[512, 2000])
    parser.option("--requests", 10, "of each length", quick=3)
    parser.option("--output-tokens", 24)
    parser.option("--wire-codecs", ["auto"], "how KV is sent, each by a server of its own: raw, exact, auto")
    settings = parser.settings()
    rows: list[dict[str, Any]] = []
    for codec in settings.wire_codecs:
        with serving(ONE_PAIR_ALWAYS, settings.model, f"--wire-codec={codec}") as server:
            rows += ({"": codec} | run_measured(measure(server, settings, num)) for num in settings.prompt_tokens)
    print_rows(f"Exposed KV transfer, {settings.requests} requests of each length, one at a time", rows, "medians")
    write_result("exposure", settings, rows)


async def measure(server: Server, settings: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    """Medians of prompts of one length."""
    prompts = await server.prompts(settings.requests + 1, num_tokens, 1_000_003 * settings.seed + num_tokens)
    timings = []
    for prompt in prompts:
        timing = await server.greedy(prompt, settings.output_tokens)
        if len(timing.itl_s) < 2:
            raise RuntimeError(f"{len(timing.event_times_s)} events are too few to tell a decode step")
        timings.append(timing)
        await asyncio.sleep(0.1)  # keeps the server's end-of-request work out of the next request
    timings = timings[1:]  # the first request connects the two workers
    exposed = Distribution.of(exposed_s(timing) for timing in timings)
    return {
        "prompt tokens": num_tokens,
        "TTFT ms": 1e3 * statistics.median(timing.ttft_s for timing in timings),
        "second token after ms": 1e3 * statistics.median(timing.itl_s[0] for timing in timings),
        "decode step ms": 1e3 * statistics.median(statistics.median(timing.itl_s[1:]) for timing in timings),
        **in_ms("exposed ms", exposed, "p50", "max"),
        "% of TTFT": 100 * statistics.median(exposed_s(timing) / timing.ttft_s for timing in timings),
    }


def exposed_s(timing: StreamTiming) -> float:
    """Seconds the second token came later than a decode step explains."""
    first_gap, *other_gaps = timing.itl_s
    return max(0.0, first_gap - statistics.median(other_gaps))


if __name__ == "__main__":
    main()
