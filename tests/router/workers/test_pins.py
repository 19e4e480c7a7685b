from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry, generate_latest

from tandem.protocol.digest import DIGEST_BYTES, EVERYONE, block_digests, root_digest
from tandem.protocol.errors import ContextLengthExceeded, NoWorker, PinNotFound, PinQuotaExceeded, RequestError
from tandem.protocol.messages import (
    Message,
    Pin,
    PinLoad,
    PinQuery,
    PinReport,
    Prefetch,
    Role,
    Unpin,
    WorkerLoad,
    WorkerState,
)
from tandem.router.backend import GenerateRequest, HintAction, PinRequest
from tandem.router.workers.metrics import PinCollector
from tandem.router.workers.pin_ledger import CONVERSATION_BYTES, Conversations, PinLedger, PinnedChain, PinOwner
from tandem.router.workers.pins import max_pinned_blocks
from tandem.scheduling.admission.tenants import PinQuotas, Tenants
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import NAMESPACE, add_ready, make_card
from tests.support.fake_worker import FakeCluster, FakeWorker, fake_cluster, first_token, make_request, remaining_tokens
from tests.support.streams import Pulled
from tests.support.waiting import eventually

PINNABLE = {"pool": 10}
T, U = PinOwner("t", EVERYONE), PinOwner("u", EVERYONE)


def digests(*names: int) -> list[bytes]:
    return [bytes([name]) * 16 for name in names]


def make_ledger(*, max_pins: int = 10, max_pins_per_tenant: int = 10, tenant_share: float = 1.0) -> PinLedger:
    return PinLedger(
        PinQuotas(max_pins=max_pins, max_pins_per_tenant=max_pins_per_tenant, pin_tenant_share=tenant_share)
    )


def add(
    ledger: PinLedger,
    pin_id: str,
    *chain: int,
    tenant: str = "",
    conversation_id: str = "",
    expires_at: float = 100.0,
    max_blocks: int = 6,
    now: float = 0.0,
) -> None:
    pin = PinnedChain(pin_id, PinOwner(tenant, EVERYONE), conversation_id, expires_at, Prefetch.HOST)
    ledger.add(pin, digests(*chain), max_blocks, now)
    ledger.check_integrity()


def hinted(pin_id: str, tenant: str = "", conversation_id: str = "", expires_at: float = 100.0) -> PinnedChain:
    return PinnedChain(pin_id, PinOwner(tenant, EVERYONE), conversation_id, expires_at, Prefetch.HOST, is_hint=True)


def test_hints_of_each_turn_extend_one_pin_within_the_quota() -> None:
    ledger = make_ledger(max_pins=3)
    add(ledger, "api", 1, 2)
    first = ledger.retain(hinted("h1"), digests(1, 2, 3), 6, 0.0)
    assert (first.pin_id, len(first.digests)) == ("h1", 3)  # the pin of the API stays as it is
    again = ledger.retain(hinted("h2", expires_at=50.0), digests(1, 2, 3, 4, 5, 6, 7, 8), 6, 0.0)
    assert (again.pin_id, len(again.digests), again.expires_at) == ("h1", 6, 100.0)
    other = ledger.retain(hinted("h3", expires_at=150.0), digests(1, 2, 9), 6, 0.0)
    assert (other.pin_id, len(other.digests)) == ("h3", 2)  # a branch: another pin, as far as there is room
    for refused in (hinted("h4"), hinted("h5", "u"), hinted("h6", conversation_id="c")):
        with pytest.raises(PinQuotaExceeded):
            ledger.retain(refused, digests(20), 6, 0.0)
    assert len(ledger) == 3
    ledger.check_integrity()


@pytest.mark.parametrize(
    ("ledger", "tenant", "chain", "quota"),
    [
        (make_ledger(max_pins=2), "", [9], "max_pins"),
        (make_ledger(max_pins_per_tenant=1), "b", [9], "max_pins_per_tenant"),
        (make_ledger(), "c", [7, 8, 9], "pin_share"),
        (make_ledger(tenant_share=0.5), "a", [7, 8], "pin_tenant_share"),
    ],
    ids=["pins", "pins of a tenant", "blocks", "blocks of a tenant"],
)
def test_a_refusal_names_the_quota_and_its_limit(ledger: PinLedger, tenant: str, chain: list[int], quota: str) -> None:
    add(ledger, "a", 1, 2, tenant="a", expires_at=30.0)
    add(ledger, "b", 3, 4, tenant="b", expires_at=50.0)
    with pytest.raises(PinQuotaExceeded, match=rf"over the limit of \d+ \({quota}\)") as refused:
        add(ledger, "c", *chain, tenant=tenant)
    assert refused.value.retry_after_s == 30.0
    assert ledger.num_refused == {quota: 1}
    assert (len(ledger), ledger.num_blocks) == (2, 4)
    add(ledger, "c", *chain, tenant=tenant, now=50.0)  # by then they have expired
    assert len(ledger) == 1


def test_a_keys_pins_are_limited_beside_those_of_its_tenant() -> None:
    ledger = make_ledger()

    def pin(pin_id: str, key_id: str, limit: int | None, *, now: float = 0.0) -> None:
        chain = PinnedChain(pin_id, T, "", now + 30.0, Prefetch.HOST, key_id=key_id)
        ledger.add(chain, digests(1), 100, now, max_of_key=limit)

    for number in range(2):
        pin(f"a{number}", "k-a", 2, now=float(number))
    with pytest.raises(PinQuotaExceeded, match=r"The API key k-a has 2 pins, and its limit is pins=2") as raised:
        pin("a2", "k-a", 2, now=10.0)
    assert raised.value.retry_after_s == 20.0
    pin("b", "k-b", 2, now=10.0)  # of the same tenant
    pin("c", "", None, now=10.0)
    pin("a3", "k-a", 2, now=30.0)  # the key's first pin has expired
    with pytest.raises(RequestError, match=r"The API key k-c may pin nothing \(pins=0\)"):
        pin("d", "k-c", 0)
    assert ledger.num_refused == {"key_pins": 2}
    ledger.check_integrity()


def test_an_expired_pin_is_not_found() -> None:
    ledger = make_ledger()
    add(ledger, "a", 1, expires_at=10.0)
    assert ledger.get("a", None, 9.9).pin_id == "a"
    with pytest.raises(PinNotFound, match="no pin 'a'"):
        ledger.get("a", None, 10.0)
    assert ledger.num_blocks == 0


def test_pins_follow_their_own_conversation_as_far_as_the_quota_goes() -> None:
    ledger = make_ledger()
    add(ledger, "a", 1, conversation_id="x", tenant="t")
    add(ledger, "other tenant", 2, conversation_id="x", tenant="u")
    add(ledger, "other conversation", 3, conversation_id="y", tenant="t")
    (changed,) = ledger.follow(T, "x", digests(1, 4, 5, 6, 7, 8), max_blocks=6, now=0.0)
    assert (changed.pin_id, changed.digests) == ("a", tuple(digests(1, 4, 5, 6)))
    assert ledger.num_blocks == 6
    assert ledger.follow(T, "x", digests(1, 4, 5, 6, 7, 9), max_blocks=6, now=0.0) == []
    (changed,) = ledger.follow(T, "x", digests(1, 9), max_blocks=6, now=0.0)  # edited: the replaced turns are unpinned
    assert changed.digests == tuple(digests(1, 9))
    ledger.check_integrity()


def test_blocks_of_another_pin_take_no_room_of_a_turn() -> None:
    ledger = make_ledger()
    add(ledger, "a", 1, conversation_id="x", tenant="t")
    add(ledger, "b", 1, 2, conversation_id="y", tenant="t")
    (changed,) = ledger.follow(T, "x", digests(1, 2, 3, 4, 5), max_blocks=4, now=0.0)
    assert changed.digests == tuple(digests(1, 2, 3, 4))


class PinLedgerMachine(RuleBasedStateMachine):
    """After any sequence of operations the quotas hold, and the live pins are those that were added and not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = make_ledger(max_pins=4, max_pins_per_tenant=3, tenant_share=0.5)
        self.expiries: dict[str, float] = {}

    @rule(tenant=st.sampled_from("tu"), chain=st.integers(0, 4), start=st.integers(0, 2), ttl_s=st.integers(1, 9))
    def pin(self, tenant: str, chain: int, start: int, ttl_s: int) -> None:
        pin_id = f"p{len(self.expiries)}"
        first = (10 if tenant == "t" else 60) + 10 * start
        try:
            add(
                self.ledger,
                pin_id,
                *range(first, first + chain),
                tenant=tenant,
                conversation_id=str(start),
                expires_at=self.now + ttl_s,
                max_blocks=10,
                now=self.now,
            )
        except PinQuotaExceeded:
            return
        self.expiries[pin_id] = self.now + ttl_s

    @rule(
        tenant=st.sampled_from("tu"),
        start=st.integers(0, 2),
        chain=st.integers(0, 9),
        follows=st.booleans(),
        ttl_s=st.integers(1, 9),
    )
    def hint(self, tenant: str, start: int, chain: int, follows: bool, ttl_s: int) -> None:
        first = (10 if tenant == "t" else 60) + 10 * start
        pin = hinted(f"h{len(self.expiries)}", tenant, str(start) if follows else "", self.now + ttl_s)
        try:
            kept = self.ledger.retain(pin, digests(*range(first, first + chain)), 10, self.now)
        except PinQuotaExceeded:
            return
        self.expiries[kept.pin_id] = max(self.expiries.get(kept.pin_id, 0), self.now + ttl_s)

    @rule(tenant=st.sampled_from("tu"), start=st.integers(0, 2), length=st.integers(0, 9))
    def turn(self, tenant: str, start: int, length: int) -> None:
        first = (10 if tenant == "t" else 60) + 10 * start
        self.ledger.follow(PinOwner(tenant, EVERYONE), str(start), digests(*range(first, first + length)), 10, self.now)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if live := [pin.pin_id for pin in self.ledger.live(self.now)]:
            pin_id = data.draw(st.sampled_from(live))
            self.ledger.remove(pin_id)
            self.expiries[pin_id] = self.now

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def quotas_hold(self) -> None:
        live = self.ledger.live(self.now)
        assert {pin.pin_id for pin in live} == {pin_id for pin_id, end in self.expiries.items() if end > self.now}
        assert len(live) <= 4
        for tenant in "tu":
            pins = [pin for pin in live if pin.owner.tenant == tenant]
            assert len(pins) <= 3
            assert len({digest for pin in pins for digest in pin.digests}) <= 5
        self.ledger.check_integrity()


TestPinLedgerMachine = PinLedgerMachine.TestCase


def test_conversations_are_known_by_tenant_and_the_oldest_is_forgotten() -> None:
    conversations = Conversations(max_bytes=2 * CONVERSATION_BYTES + 2 * len("tx") + 4 * DIGEST_BYTES)
    conversations.note(T, "x", digests(1, 2))
    conversations.note(T, "y", digests(3, 4))
    assert conversations.digests(T, "x") == digests(1, 2)
    assert conversations.digests(U, "x") == []
    conversations.note(T, "x", digests(1, 2))  # used again, so the other one is the oldest
    conversations.note(T, "z", digests(5))
    assert conversations.digests(T, "y") == []
    assert conversations.digests(T, "x") == digests(1, 2)
    conversations.note(T, "z", digests(5, 6))
    assert len(conversations) == 2
    conversations.note(T, "z", digests(*range(50, 99)))  # longer than `max_bytes`
    assert len(conversations) == 0
    for number in range(9):
        conversations.note(T, f"empty {number}", [])
    assert len(conversations) == 2


def test_a_tenant_that_names_many_conversations_forgets_its_own() -> None:
    conversations = Conversations(max_bytes=10 * CONVERSATION_BYTES)
    for number in range(3):
        conversations.note(U, f"kept {number}", digests(number))
    for number in range(1000):
        conversations.note(T, f"{number}", digests(number % 256))
    assert all(conversations.digests(U, f"kept {number}") == digests(number) for number in range(3))
    assert conversations.digests(T, "999") == digests(999 % 256)
    conversations.note(T, "large", digests(*range(256), *range(256)))  # longer than `max_bytes`
    assert conversations.digests(T, "large") == []
    assert all(conversations.digests(U, f"kept {number}") == digests(number) for number in range(3))
    for number in range(3, 100):  # a tenant within its share evicts the oldest conversation of any tenant
        conversations.note(U, f"kept {number}", digests(number))
    assert len(conversations) <= 10


def test_pins_may_cover_the_blocks_that_decode_workers_can_keep() -> None:
    registry = Registry()
    for worker_id, role, bounds in (
        ("p", Role.PREFILL, {"pool": 100}),
        ("d0", Role.DECODE, {"pool": 10, "host": 30}),
        ("d1", Role.DECODE, {"pool": 20}),
    ):
        add_ready(registry, make_card(worker_id, role, max_pinned_blocks=bounds))
    assert max_pinned_blocks(registry) == 50
    card = make_card("d2", Role.DECODE, max_pinned_blocks={"acme": 70}, tiers={"acme": "pool#1"})
    add_ready(registry, card)
    assert max_pinned_blocks(registry) == 70
    registry.set_state("d2", WorkerState.DEAD, "test")
    assert max_pinned_blocks(registry) == 50


# With workers behind real sockets.


def keeper(worker: FakeWorker, message: Message) -> None:
    """Report two blocks in the pool for every pin, and serve both sub-requests."""
    if isinstance(message, PinQuery):
        worker.send(PinReport(query_id=message.query_id, held={pin_id: {"pool": 2} for pin_id in message.pin_ids}))
    (first_token if worker.card.role is Role.PREFILL else remaining_tokens)(worker, message)


async def add_keeper(cluster: FakeCluster, worker_id: str, role: Role, *, epoch: int = 1) -> FakeWorker:
    worker = FakeWorker(worker_id, role, keeper, epoch=epoch)
    worker.card = msgspec.structs.replace(worker.card, max_pinned_blocks=PINNABLE)
    return await cluster.add(worker)


def chain(num_tokens: int) -> list[bytes]:
    return block_digests(root_digest(NAMESPACE), range(num_tokens), 16)


def pins_of(worker: FakeWorker) -> list[Pin]:
    return [message for message in worker.received if isinstance(message, Pin)]


async def test_a_pin_reaches_every_worker_and_the_likely_ones_prefetch_it() -> None:
    async with fake_cluster() as cluster:
        workers = [
            await add_keeper(cluster, worker_id, role)
            for worker_id, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
        ]
        workers[2].cached = chain(64)
        cluster.index.speculate(["d1"], chain(64), time.monotonic())
        state = await cluster.flow.cache.pin(PinRequest(token_ids=list(range(70)), cache_scope=EVERYONE, ttl_s=60.0))
        assert (state.num_blocks, state.num_tokens) == (4, 64)
        assert 0 < state.remaining_s <= 60
        assert state.held == {"p": {"pool": 2}, "d0": {"pool": 2}, "d1": {"pool": 2}}
        for worker, prefetch in zip(workers, (Prefetch.HOST, Prefetch.NONE, Prefetch.HOST), strict=True):
            (message,) = pins_of(worker)
            assert (message.pin_id, message.digests, message.prefetch) == (state.pin_id, chain(64), prefetch)
            assert 59 < message.ttl_s <= 60
        await cluster.flow.cache.prefetch(state.pin_id, Prefetch.POOL, None)
        assert [pins_of(worker)[-1].prefetch for worker in workers] == ["pool", "none", "pool"]
        assert [pin.pin_id for pin in await cluster.flow.cache.pins("default", EVERYONE)] == [state.pin_id]
        assert await cluster.flow.cache.pins("another", None) == []
        await cluster.flow.cache.unpin(state.pin_id, None)
        await eventually(lambda: all(worker.of_type(Unpin) for worker in workers))
        with pytest.raises(PinNotFound):
            await cluster.flow.cache.unpin(state.pin_id, None)
        assert (await cluster.flow.pools())["pins"]["num_pins"] == 0


async def test_a_restarted_worker_gets_its_pins_again_with_the_remaining_time() -> None:
    async with fake_cluster() as cluster:
        first = await add_keeper(cluster, "d", Role.DECODE)
        state = await cluster.flow.cache.pin(PinRequest(token_ids=list(range(40)), cache_scope=EVERYONE, ttl_s=60.0))
        cluster.client.mark_dead("d", "test")
        await first.close()
        second = await add_keeper(cluster, "d", Role.DECODE, epoch=2)
        await eventually(lambda: bool(pins_of(second)))
        (message,) = pins_of(second)
        assert (message.pin_id, message.digests, message.prefetch) == (state.pin_id, chain(32), Prefetch.HOST)
        assert message.ttl_s < pins_of(first)[0].ttl_s


async def test_a_worker_that_does_not_answer_is_listed_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.workers.pins.REPORT_TIMEOUT_S", 0.05)
    async with fake_cluster() as cluster:
        await add_keeper(cluster, "d", Role.DECODE)
        await cluster.add(FakeWorker("p", Role.PREFILL))
        state = await cluster.flow.cache.pin(PinRequest(token_ids=list(range(40)), cache_scope=EVERYONE))
        assert state.held == {"d": {"pool": 2}, "p": None}


def conversation_request(num_prompt_tokens: int) -> GenerateRequest:
    request = make_request(num_prompt_tokens=num_prompt_tokens)
    return GenerateRequest("c0", request.token_ids, request.sampling, request.cache_scope, conversation_id="chat")


@pytest.mark.parametrize(("num_prompt_tokens", "num_blocks"), [(44, [0, 2]), (45, [0, 2, 3])])
async def test_a_pinned_conversation_grows_by_prompt_and_answer(num_prompt_tokens: int, num_blocks: list[int]) -> None:
    """The answer has four tokens, and the KV of the last one is never computed."""
    async with fake_cluster() as cluster:
        await add_keeper(cluster, "p", Role.PREFILL)
        decode = await add_keeper(cluster, "d", Role.DECODE)
        state = await cluster.flow.cache.pin(PinRequest(token_ids=None, cache_scope=EVERYONE, conversation_id="chat"))
        assert (state.num_blocks, state.conversation_id) == (0, "chat")
        request = conversation_request(num_prompt_tokens)
        deltas = [delta async for delta in Pulled(cluster.flow.serve(request))]
        answer = [token_id for delta in deltas for token_id in delta.token_ids]
        assert len(answer) == 4
        whole = block_digests(root_digest(NAMESPACE), [*request.token_ids, *answer], 16)
        await eventually(lambda: len(pins_of(decode)) >= len(num_blocks))
        assert [message.digests for message in pins_of(decode)] == [whole[:count] for count in num_blocks]
        # A later pin of the conversation covers the turns before it.
        later = await cluster.flow.cache.pin(PinRequest(token_ids=None, cache_scope=EVERYONE, conversation_id="chat"))
        assert later.num_blocks == num_blocks[-1]
        assert [len(message.digests) for message in pins_of(decode)] == [*num_blocks, num_blocks[-1]]


@pytest.mark.parametrize(
    ("num_tokens", "ttl_s", "error", "message"),
    [
        (15, 9.0, RequestError, "15 tokens long, shorter than a KV block of 16"),
        (40_000, 9.0, ContextLengthExceeded, "40000 tokens"),
        (20, 101.0, RequestError, "ttl_s=101 is over max_pin_ttl_s=100"),
        (16 * 11, 9.0, PinQuotaExceeded, "11 blocks of all pins, over the limit of 10"),
    ],
)
async def test_what_cannot_be_pinned_is_refused(
    num_tokens: int, ttl_s: float, error: type[Exception], message: str
) -> None:
    quotas = PinQuotas(max_pin_ttl_s=100.0, pin_tenant_share=1.0)
    async with fake_cluster(tenants=Tenants(pins=quotas)) as cluster:
        worker = await add_keeper(cluster, "d", Role.DECODE)
        with pytest.raises(error, match=message):
            await cluster.flow.cache.pin(PinRequest(token_ids=[1] * num_tokens, cache_scope=EVERYONE, ttl_s=ttl_s))
        assert pins_of(worker) == []


async def test_a_hint_prefetches_where_there_is_a_tier_within_the_limits() -> None:
    async with fake_cluster() as cluster:
        cache, asked = cluster.flow.cache, PinRequest(token_ids=list(range(70)), cache_scope=EVERYONE, ttl_s=1e300)
        await add_keeper(cluster, "p", Role.PREFILL)
        for action in (HintAction.PREFETCH, HintAction.DEMOTE):
            with pytest.raises(RequestError, match="No worker has a tier"):
                await cache.hint(asked, action)
        worker = FakeWorker("d", Role.DECODE, keeper)
        worker.card = msgspec.structs.replace(worker.card, max_pinned_blocks={"host": 6}, tiers={"host": ""})
        await cluster.add(worker)
        got = await cache.hint(replace(asked, prefetch=Prefetch.POOL), HintAction.PREFETCH)
        assert (round(got.ttl_s), got.num_tokens, got.is_cut) == (3600, 48, True)  # half of what all tenants may pin
        await eventually(lambda: pins_of(worker))
        (sent,) = pins_of(worker)
        assert (sent.digests, sent.prefetch) == (chain(48), Prefetch.POOL)
        assert not (await cache.hint(asked, HintAction.DEMOTE)).is_cut
        await cache.hint(replace(asked, token_ids=list(range(90))), HintAction.RETAIN)
        assert len(await cache.pins(None, None)) == 1
        with pytest.raises(RequestError, match="shorter than a KV block"):
            await cache.hint(replace(asked, token_ids=[1]), HintAction.RETAIN)


async def test_without_a_worker_nothing_is_pinned() -> None:
    async with fake_cluster() as cluster:
        with pytest.raises(NoWorker):
            await cluster.flow.cache.pin(PinRequest(token_ids=[1] * 20, cache_scope=EVERYONE))
        for action in HintAction:
            with pytest.raises((NoWorker, RequestError)):
                await cluster.flow.cache.hint(PinRequest(token_ids=[1] * 20, cache_scope=EVERYONE), action)


async def test_a_workers_pinned_blocks_are_in_the_pools_report_and_in_the_metrics() -> None:
    async with fake_cluster() as cluster:
        await add_keeper(cluster, "d", Role.DECODE)
        load = PinLoad(num_pins=1, num_blocks={"pool": 2}, num_prefetched={"host": 3})
        cluster.registry.note_load("d", WorkerLoad(), now=0.0)
        cluster.registry.note_pins("d", load)
        (worker,) = (await cluster.flow.pools())["roles"]["decode"]
        assert worker["pins"] == {"num_pins": 1, "num_blocks": {"pool": 2}, "num_prefetched": {"host": 3}}
        cluster.flow.cache.ledger.num_refused["max_pins"] += 5
        metrics = CollectorRegistry()
        metrics.register(PinCollector(cluster.flow.cache, cluster.registry))
        lines = generate_latest(metrics).decode().splitlines()
        for line in (
            "tandem_router_pins 0.0",
            "tandem_router_max_pinned_blocks 10.0",
            'tandem_router_refused_pins_total{reason="max_pins"} 5.0',
            'tandem_pinned_blocks{place="pool",worker="d"} 2.0',
            'tandem_prefetched_blocks_total{place="host",worker="d"} 3.0',
        ):
            assert line in lines
