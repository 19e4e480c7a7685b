"""What the supervisor makes of what Ray tells it; its work with real processes is in tests/e2e."""

from __future__ import annotations

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.supervisor import _first_line
from protocol.errors import ConfigError


def test_an_error_of_ours_is_shown_without_what_ray_wraps_it_in() -> None:
    wrapped = RayTaskError(
        function_name="WorkerActor.start()",
        traceback_str="ray::WorkerActor.start() (pid=1)\nTraceback ...\nConfigError: x",
        cause=ConfigError("pool_bytes=9 holds 0 blocks of 10 bytes; at least two are needed"),
    ).as_instanceof_cause()
    assert isinstance(wrapped, ConfigError)
    assert _first_line(wrapped) == "pool_bytes=9 holds 0 blocks of 10 bytes; at least two are needed"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("one line"), "one line"),
        (TimeoutError(), "TimeoutError"),
        (RuntimeError("a\n  b\n\n"), "b"),
    ],
)
def test_every_error_has_a_line(error: Exception, line: str) -> None:
    assert _first_line(error) == line


def test_a_dead_process_has_a_line() -> None:
    assert "\n" not in _first_line(ActorDiedError())
    assert _first_line(ActorDiedError())


def test_a_killed_process_is_told_without_what_might_have_caused_it() -> None:
    context = ActorDiedErrorContext(
        class_name="WorkerActor",
        actor_id=b"a" * 16,
        pid=7,
        error_message="The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
        "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes...",
    )
    assert _first_line(ActorDiedError(context)) == "The actor is dead because its worker process has died"
