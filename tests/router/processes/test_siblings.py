"""Shared bookings: after any messages, losses and deaths every process counts what the living ones have open."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.messages import WorkerState
from tandem.router.processes.sibling_messages import (
    EngineEntry,
    Opened,
    OpenRequest,
    SiblingMessage,
    Stamp,
    decode_sibling_message,
    encode_sibling_message,
)
from tandem.router.processes.siblings import BEAT_INTERVAL_S, REMOVED_S, SILENCE_S, PeerRouters, SharedBooking
from tandem.scheduling.load import RequestLoad
from tandem.scheduling.registry import Registry
from tests.support.builders import make_card

WORKERS = ("a", "b", "c")


class Process:
    """One process of the router: its registry, its siblings and what its requests hold."""

    def __init__(self, name: str, epoch: int, net: Net) -> None:
        self.registry = Registry()
        self.siblings = PeerRouters(self.registry, name=name, epoch=epoch)
        self.siblings.send = lambda message: net.send(name, message)
        self.siblings.lasting = {"y"}
        self.siblings.listen(self)
        self.bookings: list[SharedBooking] = []
        self.heard: list[tuple[str, Any]] = []
        for worker in WORKERS:
            self.add(worker)

    def add(self, worker: str) -> None:
        if self.registry.get(worker) is None:
            self.registry.add(make_card(worker), 0.0)
            self.registry.set_state(worker, WorkerState.READY, "test")

    def open(self, prefill: str, decode: str, num_tokens: int) -> None:
        if self.registry.get(prefill) is None or self.registry.get(decode) is None:
            return
        self.bookings.append(self.siblings.reserve(RequestLoad(prefill, decode, num_tokens, 3, 2 * num_tokens), [b"d"]))

    def sibling_opened(self, load: RequestLoad, digests: Any) -> None:
        self.heard.append(("opened", (load.prefill, list(digests))))

    def sibling_first_token(self, load: RequestLoad, wait_s: float) -> None:
        self.heard.append(("first token", (load.prefill, wait_s)))

    def sibling_ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self.heard.append(("ended", (num_prompt_tokens, num_output_tokens)))

    def sibling_engine(self, entry: EngineEntry) -> None:
        self.heard.append(("engine", (entry.name, entry.spec)))


class Net:
    """Processes and the messages under way between each two of them, in order, as bytes."""

    def __init__(self, num_processes: int) -> None:
        self.now = 0.0
        self.queues: dict[tuple[str, str], deque[bytes]] = {}
        self.processes: dict[str, Process] = {}
        self.epoch = 0
        for number in range(num_processes):
            self.start(str(number))

    def start(self, name: str) -> Process:
        self.epoch += 1
        process = self.processes[name] = Process(name, self.epoch, self)
        return process

    def kill(self, name: str) -> None:
        """Messages to it are gone; those it sent may still arrive."""
        self.processes.pop(name, None)
        for way in [way for way in self.queues if way[1] == name]:
            del self.queues[way]

    def send(self, sender: str, message: SiblingMessage) -> None:
        for name in self.processes:
            if name != sender:
                self.queues.setdefault((sender, name), deque()).append(encode_sibling_message(message))

    def deliver(self, way: tuple[str, str]) -> None:
        frame = self.queues[way].popleft()
        if way[1] in self.processes:
            self.processes[way[1]].siblings.receive(decode_sibling_message(frame), self.now)

    def deliver_all(self) -> None:
        for _ in range(10_000):
            ways = [way for way, queue in self.queues.items() if queue]
            if not ways:
                return
            for way in ways:
                self.deliver(way)
        raise AssertionError("messages go round for ever")

    def tick(self) -> None:
        self.now += BEAT_INTERVAL_S
        for process in self.processes.values():
            process.siblings.tick(self.now)

    def settle(self) -> None:
        """Long enough for every gap to be seen and every dead process to be missed."""
        for _ in range(int(SILENCE_S / BEAT_INTERVAL_S) + 3):
            self.tick()
            self.deliver_all()

    def restore_workers(self) -> None:
        for process in self.processes.values():
            for worker in WORKERS:
                process.add(worker)

    def words_on(self, engine: str) -> set[str]:
        """What the living processes think of an engine."""
        return {repr(process.siblings.engines.get(engine)) for process in self.processes.values()}

    def assert_all_agree(self) -> None:
        """Each process counts for each worker what all living processes have open there."""
        requests = [request for process in self.processes.values() for request in process.siblings._ours.values()]
        for process in self.processes.values():
            process.siblings.check_integrity()
            assert process.registry.num_bookings == len(requests)
            assert sorted(process.siblings.living) == sorted(self.processes.keys() - {process.siblings.name})
            assert process.siblings.is_joined
            for worker in process.registry:
                name = worker.worker_id
                mine = [request for request in requests if request.load.decode == name]
                waiting = [one.load for one in requests if one.load.prefill == name and not one.has_first_token]
                assert worker.num_booked_seqs == len(mine)
                assert worker.booked_kv_tokens == sum(request.load.num_kv_tokens for request in mine)
                assert worker.queued_prompt_tokens == sum(load.num_new_tokens for load in waiting)
                assert worker.num_awaited_seqs == sum(not request.has_first_token for request in mine)


def test_a_booking_is_counted_by_all_until_it_is_released() -> None:
    net = Net(3)
    net.settle()
    net.processes["0"].open("a", "b", 100)
    net.deliver_all()
    net.assert_all_agree()
    other = net.processes["2"]
    assert (other.siblings.num_on("a"), other.siblings.num_on("b"), other.siblings.num_on("c")) == (1, 1, 0)
    [booking] = net.processes["0"].bookings
    booking.prefill_done(0.25)
    net.deliver_all()
    net.assert_all_agree()
    booking.release(100, 7)
    booking.release(100, 7)
    net.deliver_all()
    net.assert_all_agree()
    assert other.heard == [("opened", ("a", [b"d"])), ("first token", ("a", 0.25)), ("ended", (100, 7))]
    assert other.registry.num_bookings == 0


def test_a_first_token_nobody_saw_teaches_nothing_and_still_counts() -> None:
    net = Net(2)
    net.settle()
    net.processes["0"].open("a", "a", 10)
    net.processes["0"].bookings[0].prefill_done()
    net.deliver_all()
    net.assert_all_agree()
    assert [kind for kind, _ in net.processes["1"].heard] == ["opened"]


def test_who_joins_learns_what_is_open_and_what_engines_there_are() -> None:
    net = Net(2)
    net.settle()
    net.processes["0"].open("a", "a", 10)
    net.processes["1"].siblings.set_engine("x", {"url": "u"})
    net.processes["0"].siblings.set_engine("y", None)
    net.deliver_all()
    joined = net.start("2")
    net.tick()
    net.deliver_all()
    net.assert_all_agree()
    assert {name: entry.spec for name, entry in joined.siblings.engines.items()} == {"x": {"url": "u"}, "y": None}


def test_a_process_that_dies_has_nothing_open_when_it_is_back_or_silent_for_too_long() -> None:
    net = Net(2)
    net.settle()
    for _ in range(2):
        net.processes["0"].open("a", "a", 10)
        net.deliver_all()
        assert net.processes["1"].registry.num_bookings == 1
        net.kill("0")
        net.start("0")
        net.tick()
        net.deliver_all()
        net.assert_all_agree()
    net.processes["0"].open("a", "a", 10)
    net.deliver_all()
    net.kill("0")
    while net.processes["1"].siblings.living:
        net.tick()
        assert net.now < 20
    assert net.processes["1"].registry.num_bookings == 0


def test_who_was_only_silent_is_asked_what_it_has_open() -> None:
    net = Net(2)
    net.settle()
    net.processes["0"].open("a", "a", 10)
    net.deliver_all()
    for _ in range(round(2 * SILENCE_S / BEAT_INTERVAL_S)):
        net.now += BEAT_INTERVAL_S
        net.processes["1"].siblings.tick(net.now)
    assert net.processes["1"].registry.num_bookings == 0
    net.tick()
    net.deliver_all()
    net.assert_all_agree()


def test_who_slept_takes_nobody_else_for_silent() -> None:
    net = Net(2)
    net.settle()
    net.processes["0"].open("a", "a", 10)
    net.deliver_all()
    sleeper = net.processes["1"]
    sleeper.siblings.tick(net.now)
    net.now += 10 * SILENCE_S  # the other beats meanwhile, and none of it is read
    sleeper.siblings.tick(net.now)
    assert sleeper.registry.num_bookings == 1
    for _ in range(round(SILENCE_S / BEAT_INTERVAL_S)):
        sleeper.siblings.tick(net.now)
        assert sleeper.registry.num_bookings == 1
        net.now += BEAT_INTERVAL_S
    net.now += BEAT_INTERVAL_S / 2
    sleeper.siblings.tick(net.now)
    assert sleeper.registry.num_bookings == 0  # now it has had all the time again


def test_who_says_goodbye_is_forgotten_at_once() -> None:
    net = Net(2)
    net.settle()
    net.processes["0"].open("a", "a", 10)
    net.processes["0"].siblings.leave()
    net.deliver_all()
    assert net.processes["1"].siblings.living == []
    assert net.processes["1"].registry.num_bookings == 0


def test_a_worker_that_is_new_here_gets_what_siblings_have_on_it() -> None:
    net = Net(2)
    net.settle()
    late = net.processes["1"]
    late.registry.set_state("a", WorkerState.DEAD, "test")
    net.processes["0"].open("a", "b", 10)
    net.processes["0"].bookings[0].prefill_done()
    net.deliver_all()
    assert (late.registry.num_bookings, late.siblings.num_on("a")) == (0, 1)
    late.add("a")
    net.assert_all_agree()


def test_the_latest_word_on_an_engine_counts_everywhere() -> None:
    net = Net(3)
    net.settle()
    for number in range(3):  # at the same moment
        net.processes[str(number)].siblings.set_engine("x", {"url": str(number)})
    net.deliver_all()
    assert len(net.words_on("x")) == 1
    net.processes["1"].siblings.set_engine("x", None)
    net.deliver_all()
    assert [process.siblings.engines["x"].spec for process in net.processes.values()] == [None] * 3


def test_a_removal_is_forgotten_in_time_but_of_engines_that_all_begin_with() -> None:
    net = Net(3)
    net.settle()
    first = net.processes["0"].siblings
    first.set_engine("x", {"url": "u"})
    net.deliver_all()
    first.set_engine("x", None)
    first.set_engine("y", None)
    net.queues["0", "2"].clear()  # it still has x
    net.settle()
    assert net.words_on("x") == {repr(first.engines["x"])}
    net.tick()
    net.now += REMOVED_S + 1
    for _ in range(2):  # one after the other, with a snapshot of who still knows in between
        for process in net.processes.values():
            process.siblings.tick(net.now)
            net.deliver_all()
    net.start("2")
    net.settle()
    assert [list(process.siblings.engines) for process in net.processes.values()] == [["y"]] * 3
    net.processes["1"].siblings.set_engine("x", {"url": "again"})
    net.deliver_all()
    assert len(net.words_on("x")) == 1
    assert first.engines["x"].spec == {"url": "again"}
    assert first.engines["x"].version > 3


def test_messages_of_an_earlier_life_and_our_own_are_ignored() -> None:
    net = Net(2)
    net.settle()
    process = net.processes["0"]
    request = OpenRequest(1, RequestLoad("a", "a", 1, 0, 1))
    for stamp in (Stamp("1", 0, 1), Stamp("0", 99, 1)):
        process.siblings.receive(Opened(stamp, request, []), net.now)
    assert process.registry.num_bookings == 0


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\xa1o\x01\x02", b"hello"])
def test_junk_is_no_message(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_sibling_message(frame)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_after_any_messages_losses_and_deaths_the_living_agree_and_nothing_is_left(data: st.DataObject) -> None:
    net = Net(3)
    names = ("0", "1", "2")
    worker = st.sampled_from(WORKERS)
    for _ in range(data.draw(st.integers(0, 60))):
        name = data.draw(st.sampled_from(names))
        process = net.processes.get(name)
        action = data.draw(
            st.sampled_from(["open", "open", "token", "release", "deliver", "deliver", "lose", "tick", "kill", "worker",
                             "engine", "remove"])
        )  # fmt: skip
        if action == "deliver" or action == "lose":
            ways = [way for way, queue in net.queues.items() if queue]
            if ways:
                way = data.draw(st.sampled_from(ways))
                if action == "deliver":
                    net.deliver(way)
                else:
                    net.queues[way].popleft()
        elif action == "tick":
            net.tick()
        elif process is None:
            net.start(name)
        elif action == "open":
            process.open(data.draw(worker), data.draw(worker), data.draw(st.integers(1, 99)))
        elif action in ("token", "release") and process.bookings:
            booking = data.draw(st.sampled_from(process.bookings))
            if action == "token":
                booking.prefill_done(0.1)
            else:
                booking.release(1, 1)
                process.bookings.remove(booking)
        elif action == "kill":
            net.kill(name)
        elif action == "engine":
            process.siblings.set_engine("x", {"by": name})
        elif action == "remove":
            process.siblings.set_engine("x", None)
        elif action == "worker":
            gone = data.draw(worker)
            # A process whose own requests are on a worker that it lost keeps them until they end.
            if not any(gone in (ours.load.prefill, ours.load.decode) for ours in process.siblings._ours.values()):
                process.registry.set_state(gone, WorkerState.DEAD, "test")
    net.restore_workers()
    net.settle()
    net.assert_all_agree()
    words = [process.siblings.engines.get("x") for process in net.processes.values()]
    assert len({repr(word.spec if word else None) for word in words}) <= 1
    for process in net.processes.values():
        for booking in process.bookings:
            booking.release()
    net.deliver_all()
    net.assert_all_agree()
    for process in net.processes.values():
        assert process.registry.num_bookings == 0
        assert process.registry.queued_prompt_tokens == 0
