"""Names of the routing strategies, and the form of `--routing`: a strategy, then options, separated by commas."""

from __future__ import annotations

COST, KV, PREFIX, SESSION = "cost", "kv", "prefix", "session"
ROUND_ROBIN, LEAST_LOADED = "round-robin", "least-loaded"
STRATEGIES = (COST, KV, PREFIX, SESSION, ROUND_ROBIN, LEAST_LOADED)

PAIRS, HEADER = "pairs", "header"
_OPTIONS = {PAIRS, HEADER}


def routing_options(routing: str) -> list[str]:
    """What follows the strategy."""
    return routing.split(",")[1:]


def is_routing(routing: str) -> bool:
    """Whether this is a strategy and then options, each at most once."""
    strategy, *options = routing.split(",")
    return strategy in STRATEGIES and set(options) <= _OPTIONS and len(set(options)) == len(options)
