"""What each strategy keeps together, spreads and avoids. `test_placer.py` compares decisions with a plain search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import block_digests
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role, WorkerState
from tandem.protocol.routing import STRATEGIES
from tandem.scheduling.placement.choice import SHADOW_EVERY
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.placement.shadow import Shadow
from tandem.scheduling.request import ServiceClass
from tests.scheduling.placement.test_placer import Pool, chain, chosen, colocated, make_request

NAMED = [name for name in STRATEGIES if name != "cost"]


def place(
    pool: Pool, routing: str, num_prompt_tokens: int = 100, *, session: str = "", digests: list[bytes] | None = None
) -> Placement:
    service_class = ServiceClass("acme", routing=routing, session=session)
    request = make_request(num_prompt_tokens, digests=digests or [])
    return pool.placer.place(msgspec.structs.replace(request, service_class=service_class), 0.0)


def decoder(placement: Placement) -> str:
    return placement.best.decode.worker_id


def prompt(number: int, num_blocks: int = 20) -> list[bytes]:
    return block_digests(b"root" * 4, [number] * 16 * num_blocks, 16)


@pytest.mark.parametrize("strategy", NAMED)
def test_a_strategy_asks_only_workers_that_serve(strategy: str) -> None:
    pool = colocated("a", "b", "c", "d")
    pool.registry.set_state("a", WorkerState.DRAINING, "test")
    pool.registry.note_silence("b")
    pool.registry.set_state("c", WorkerState.DEAD, "test")
    for number in range(20):
        placement = place(pool, strategy, session=str(number), digests=prompt(number))
        assert decoder(placement) == "d"
        pool.book("d", "d")


@pytest.mark.parametrize("strategy", ["prefix", "session"])
def test_a_hash_spreads_evenly_and_moves_only_what_a_leaving_worker_had(strategy: str) -> None:
    names = [f"w{number}" for number in range(8)]
    pool = colocated(*names)

    def homes() -> list[str]:
        return [decoder(place(pool, strategy, session=str(n), digests=prompt(n))) for n in range(1600)]

    before = homes()
    assert all(150 <= count <= 250 for count in Counter(before).values()), Counter(before)
    pool.registry.set_state("w3", WorkerState.DEAD, "test")
    after = homes()
    assert {one for one, other in zip(before, after, strict=True) if one != other} == {"w3"}
    pool.add("w3", Role.COLOCATED)
    assert homes() == before, "a worker that comes back gets its own again, wherever it is in the table"


def test_sessions_of_two_tenants_are_not_the_same() -> None:
    pool = colocated(*(f"w{number}" for number in range(8)))
    request = make_request(100)
    homes = set()
    for tenant in ("a", "b", "c", "d", "e", "f"):
        service_class = ServiceClass(tenant, routing="session", session="1")
        homes.add(decoder(pool.placer.place(msgspec.structs.replace(request, service_class=service_class), 0.0)))
    assert len(homes) > 1


def test_the_beginning_of_a_prompt_decides_by_prefix() -> None:
    pool = colocated(*(f"w{number}" for number in range(16)))
    begin = list(range(256))

    def home(tokens: list[int]) -> str:
        return decoder(place(pool, "prefix", 1000, digests=block_digests(b"root" * 4, tokens, 16)))

    assert len({home([*begin, *[n] * 160]) for n in range(20)}) == 1
    assert len({home([n, *begin, *[1] * 160]) for n in range(20)}) > 4


def test_kv_follows_the_cache_until_the_worker_has_too_much_work() -> None:
    pool, digests = colocated("a", "b"), chain(40)
    pool.cache("b", digests)
    assert decoder(place(pool, "kv", 700, digests=digests)) == "b"
    pool.book("b", "b", new=100, kv=900)
    assert decoder(place(pool, "kv", 700, digests=digests)) == "b", (
        "1,000 tokens are 1.25 times the mean of 1,800 at most"
    )
    pool.book("b", "b", new=100, kv=900)
    assert decoder(place(pool, "kv", 700, digests=digests)) == "a"
    pool.book("a", "a", new=100, kv=900)
    assert decoder(place(pool, "kv", 700, digests=digests)) == "b"
    assert decoder(place(pool, "kv", 700, digests=prompt(1))) == "a", "nobody has it: the least loaded"


def test_round_robin_takes_turns_in_each_pool_whichever_shape_a_request_has() -> None:
    pool = Pool()
    for name in ("p0", "p1", "d0", "d1", "d2"):
        pool.add(name, Role.PREFILL if name[0] == "p" else Role.DECODE)
    seen = []
    for number in range(12):  # short prompts stay on the decode worker, so they must not count for a prefill worker
        placement = place(pool, "round-robin", 3000 if number % 2 else 2)
        assert placement.best.is_pair == bool(number % 2)
        seen.append(chosen(placement))
        pool.registry.reserve(placement.load).release()
    assert [one for one, other in seen if one != other] == ["p0", "p1"] * 3
    assert [decode for _, decode in seen] == ["d0", "d1", "d2"] * 4


def test_a_question_moves_no_turn_and_a_fork_takes_none() -> None:
    pool = colocated("a", "b")
    assert [decoder(place(pool, "round-robin")) for _ in range(3)] == ["a"] * 3
    placement = place(pool, "round-robin")
    for _ in range(3):  # the prompt's other answers are booked at the same worker
        pool.registry.reserve(placement.load).release()
    assert decoder(place(pool, "round-robin")) == "b"


def test_pair_or_one_worker_is_decided_by_cost_unless_pairs_are_asked_for() -> None:
    shapes = {}
    for options in ("", ",pairs"):
        pool = Pool(routing=f"least-loaded{options}")
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            pool.add(name, role)
        shapes[options] = [chosen(pool.place(tokens)) for tokens in (2, 4000)]
    assert shapes == {"": [("d", "d"), ("p", "d")], ",pairs": [("p", "d"), ("p", "d")]}


def test_a_requests_own_strategy_goes_before_the_servers() -> None:
    pool, digests = Pool(routing="round-robin"), chain(40)
    for name in ("a", "b"):
        pool.add(name, Role.COLOCATED)
    pool.cache("b", digests)
    placement = place(pool, "kv", 700, digests=digests)
    assert (decoder(placement), placement.strategy) == ("b", "kv")
    placement = place(pool, "", 700, digests=digests)
    assert (decoder(placement), placement.strategy) == ("a", "round-robin")


def test_the_shadow_is_what_the_other_strategy_would_have_cost() -> None:
    pool, digests = colocated("a", "b", "c"), chain(100)
    pool.cache("b", digests)
    shadow, expected = Shadow(), dict.fromkeys(NAMED, 0.0)
    for number in range(1000):
        placement = place(pool, "cost", 1600, digests=digests if number % 3 else prompt(number, 100))
        assert len(placement.shadow) <= 1
        assert all(lost_s >= 0 for lost_s in placement.shadow.values()), "cost is the least there is"
        for name in placement.shadow:
            other = place(pool, name, 1600, digests=digests if number % 3 else prompt(number, 100))
            expected[name] += other.best.terms.total_s - placement.best.terms.total_s
        shadow.note(placement)
        booking = pool.registry.reserve(placement.load)
        if number % 4:
            booking.release()
        if number % 50 == 49:
            pool.registry.set_state("a", WorkerState.DEAD, "test")
            pool.add("a", Role.COLOCATED)
    counts = shadow.num_decisions
    assert sum(counts.values()) == pytest.approx(1000 / SHADOW_EVERY, abs=5)
    assert all(count == pytest.approx(200 / SHADOW_EVERY, abs=2) for count in counts.values()), counts
    for name, mean_s in shadow.mean_lost_s.items():
        assert mean_s == pytest.approx(expected[name] / counts[name], rel=1e-6, abs=1e-9), name
    assert max(shadow.mean_lost_s.values()) > 0
    assert [name for name in STRATEGIES if name in shadow.report()] == list(shadow.report())


def test_old_traffic_fades_from_the_shadow() -> None:
    placement = colocated("a").place(10)
    shadow = Shadow()
    for lost_s, number in ((1.0, 200), (3.0, 5000)):
        for _ in range(number):
            shadow.note(replace(placement, shadow={"kv": lost_s}))
    assert shadow.report() == {"kv": {"mean_lost_s": pytest.approx(3.0, rel=0.001), "num_decisions": 5200}}


@pytest.mark.parametrize(
    "text", ["", "fast", "cost,", "cost,fast", "kv,prefix", "kv,pairs,pairs", "Cost", "cost ,pairs"]
)
def test_an_unknown_strategy_is_refused_by_name_with_the_list(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        RouterConfig(routing=text)
    assert f"routing={text!r} must be one of {', '.join(STRATEGIES)}, then pairs, header or both" in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cost", ("cost", True, False)),
        ("kv,header", ("kv", True, True)),
        ("session,header,pairs", ("session", False, True)),
    ],
)
def test_options_follow_the_strategy(text: str, expected: tuple[str, bool, bool]) -> None:
    config = RouterConfig(routing=text)
    assert (config.strategy, config.local_prefill, config.allows_routing_header) == expected
