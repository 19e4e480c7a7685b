"""Faults that may be injected into writes of KV, and how users name them."""

from __future__ import annotations

import enum


class Fault(enum.Enum):
    """The faults of a write."""

    DELAY = "write delayed"  # it stays pending, and later writes of this link queue behind it
    STICK = "write stuck"  # it stays pending, and so do later writes of this link, until the link is reset
    FAIL = "write failed"  # nothing lands
    LOSE = "link lost"  # some blocks landed, others land much later; the link is down until the peer is added again
    TEAR = "write torn"  # reported done although one block never landed
    FLIP = "bit flipped in a block"
    GARBLE = "bit flipped in a notification"
    DROP = "notification dropped"
    REPEAT = "notification repeated"


def parse_faults(text: str) -> tuple[dict[Fault, float], int]:
    """Rates of faults per write, and the seed, of a text such as `flip=0.01,delay=0.05,seed=3`.

    Raises `ValueError` for an unknown fault, a rate outside [0, 1], or rates that add up to more than one.
    """
    rates: dict[Fault, float] = {}
    seed = 0
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name == "seed":
            seed = int(value)
            continue
        fault = Fault.__members__.get(name.upper())
        if fault is None or not 0 <= float(value) <= 1:
            names = ", ".join(one.name.lower() for one in Fault)
            raise ValueError(f"{part!r} is not a fault with its rate, such as flip=0.01; the faults are {names}")
        rates[fault] = float(value)
    if sum(rates.values()) > 1:
        raise ValueError(f"the rates in {text!r} add up to more than 1")
    return rates, seed
