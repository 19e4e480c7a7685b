"""The rule by which an engine has stalled, with a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.messages import WorkerState
from tandem.router.engines.engine_fleet import stall_limit_s
from tandem.router.engines.engine_progress import EngineProgress
from tandem.router.engines.engine_status import EngineReport, ReportedLoad, WorkDone, parse_work
from tandem.router.engines.stall_watch import StallWatch

STALL_S = 30.0


class World:
    """A watch over one engine, looked at once a second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.progress = EngineProgress()
        self.stalls: list[float] = []
        self.engine = SimpleNamespace(name="a", state=WorkerState.READY, progress=self.progress, running=set())
        self.engine.stall = self._stall
        self.watch = StallWatch(lambda: [cast(Any, self.engine)], STALL_S, lambda: self.now)

    def wait(self, seconds: int) -> list[float]:
        """Let time pass; returns when the engine was found to have stalled."""
        found = len(self.stalls)
        for _ in range(seconds):
            self.now += 1.0
            self.watch.look()
        return self.stalls[found:]

    def report(self, work: WorkDone, num_running: int = 1) -> None:
        self.progress.report(EngineReport(ReportedLoad(num_running, 0, 0.0), work), self.now)

    def _stall(self, reason: str, now: float) -> None:
        self.stalls.append(now)
        self.progress.stalled()
        assert "engine_stall_s=30" in reason


def streaming(world: World, *names: str) -> None:
    for name in names:
        world.progress.begin(name, world.now)
        world.progress.token(name, world.now)


def test_streams_of_which_none_gets_on_show_a_stall() -> None:
    world = World()
    streaming(world, "x", "y")
    assert not world.wait(30)
    assert len(world.wait(1)) == 1
    assert not world.wait(100), "its requests are gone"


def test_first_tokens_and_whole_answers_of_others_show_steps() -> None:
    world = World()
    streaming(world, "x")
    for number in range(10):
        assert not world.wait(29)
        world.progress.begin(number, world.now)
        (world.progress.token if number % 2 else world.progress.answer)(number, world.now)
        world.progress.end(number)


def test_a_client_that_takes_nothing_excuses_its_stream() -> None:
    world = World()
    streaming(world, "x")
    assert not world.wait(20)
    world.progress.hold("x", world.now, is_held=True)
    assert not world.wait(100)
    world.progress.hold("x", world.now, is_held=False)
    assert not world.wait(30)
    assert world.wait(1)


def test_counters_that_change_show_steps() -> None:
    world = World()
    streaming(world, "x")
    for second in range(100):
        world.report(WorkDone(float(second), is_of_each_step=False))
        assert not world.wait(1)
    assert not world.wait(29)
    assert world.wait(2)


@pytest.mark.parametrize("is_of_each_step", [True, False])
@pytest.mark.parametrize("num_running", [0, 1])
def test_an_engine_that_says_that_it_runs_requests_must_count(is_of_each_step: bool, num_running: int) -> None:
    world = World()
    work = WorkDone(7.0, is_of_each_step)
    world.report(work, num_running=num_running)
    assert not world.wait(100), "other clients' requests do not matter"
    world.progress.begin("waits for its first token", world.now)
    found = []
    for _ in range(40):
        world.report(work, num_running=num_running)
        found += world.wait(1)
    assert len(found) == (is_of_each_step and num_running)


def test_requests_of_others_do_not_count_once_ours_have_ended() -> None:
    world = World()
    world.progress.begin("waits for its first token", world.now)
    world.report(WorkDone(7.0, is_of_each_step=True))
    world.progress.end("waits for its first token")
    world.progress.begin("next", world.now)
    assert not world.wait(100)
    world.report(WorkDone(7.0, is_of_each_step=True))
    assert len(world.wait(31)) == 1


def test_on_trial_anything_is_due_until_a_step() -> None:
    world = World()
    streaming(world, "x")
    assert world.wait(31)
    world.progress.begin("trial", world.now)
    assert not world.wait(30)
    assert world.wait(1)
    world.progress.begin("trial 2", world.now)
    world.progress.token("trial 2", world.now)
    assert not world.progress.is_on_trial
    world.progress.end("trial 2")
    world.progress.begin("long prompt", world.now)
    assert not world.wait(100)


def test_what_is_told_of_requests_from_before_a_stall_shows_nothing() -> None:
    world = World()
    streaming(world, "x", "y")
    assert world.wait(31)
    world.progress.token("x", world.now)
    world.progress.answer("y", world.now)
    world.progress.hold("x", world.now, is_held=False)
    world.progress.end("x")
    assert world.progress.is_on_trial
    assert world.progress.silent_since_s is None


def test_a_pause_of_the_router_is_no_silence_of_engines() -> None:
    world = World()
    streaming(world, "x")
    assert not world.wait(5)
    world.now += 3600.0  # it was stopped, or the clock jumped
    assert not world.wait(30)
    assert world.wait(2)


@pytest.mark.parametrize("state", [WorkerState.DEAD, WorkerState.STARTING])
def test_an_engine_that_is_not_there_is_left_to_its_probes(state: WorkerState) -> None:
    world = World()
    streaming(world, "x")
    world.engine.state = state
    assert not world.wait(100)


def test_the_time_for_which_it_was_not_there_does_not_count() -> None:
    world = World()
    streaming(world, "x")
    world.engine.state = WorkerState.DEAD
    assert not world.wait(40)
    world.engine.state = WorkerState.READY
    world.progress.joined(world.now)
    assert not world.wait(30)
    assert world.wait(1)


@pytest.mark.parametrize(
    ("stall_s", "num_processes", "limit_s"), [(3.0, 1, 3.0), (3.0, 2, 16.0), (30.0, 2, 30.0), (0.0, 2, 0.0)]
)
def test_a_hanging_frontend_ends_before_an_engine_is_judged(stall_s: float, num_processes: int, limit_s: float) -> None:
    config = RouterConfig(worker_timeout_s=8.0, router_processes=num_processes)
    assert stall_limit_s(ExternalEnginesConfig(engine_stall_s=stall_s), config) == limit_s


REQUESTS = st.integers(0, 3)
TIMES = st.sampled_from([0.0, 0.5, 10.0])
ACTIONS = st.sampled_from(["begin", "token", "answer", "hold", "resume", "end"])


@given(st.lists(st.tuples(ACTIONS, REQUESTS, TIMES)))
def test_any_order_of_events_agrees_with_the_rule_said_plainly(events: list[tuple[str, int, float]]) -> None:
    progress, now = EngineProgress(), 0.0
    phase: dict[int, str] = {}  # as the module's table has it, by request
    since: float | None = None
    for action, request, passed_s in events:
        now += passed_s
        was_due = "due" in phase.values()
        is_step = False
        match action:
            case "begin":
                progress.begin(request, now)
                phase[request] = "sent"
            case "token" | "answer":
                (progress.token if action == "token" else progress.answer)(request, now)
                if request in phase:
                    is_step, phase[request] = True, "due" if action == "token" else "sent"
            case "hold" | "resume":
                progress.hold(request, now, is_held=action == "hold")
                former, new = ("due", "held") if action == "hold" else ("held", "due")
                if phase.get(request) == former:
                    phase[request] = new
            case "end":
                progress.end(request)
                phase.pop(request, None)
        if "due" not in phase.values():
            since = None
        elif not was_due or is_step:
            since = now
        assert progress.silent_since_s == since


METRICS = """\
vllm:num_requests_running{engine="0"} 1
vllm:iteration_tokens_total_count{engine="0"} 5
vllm:iteration_tokens_total_count{engine="1"} 7
vllm:generation_tokens_total{engine="1"} 3
"""


def test_work_is_read_of_each_rank() -> None:
    assert parse_work(METRICS, 0) == WorkDone(5.0, is_of_each_step=True)
    assert parse_work(METRICS, 1) == WorkDone(10.0, is_of_each_step=True)
    assert parse_work("sglang:realtime_tokens_total 4") == WorkDone(4.0, is_of_each_step=False)
    served = "vllm:prompt_tokens_total 3\nvllm:generation_tokens_total 4\n"  # of `tandem serve --vllm-metric-names`
    assert parse_work(served) == WorkDone(7.0, is_of_each_step=False), "a long prompt does not change it"
    assert parse_work("llamacpp:requests_processing 1") is None
