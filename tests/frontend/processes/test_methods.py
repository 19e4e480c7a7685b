"""Calls of a Protocol's methods: arguments and results are those of its type hints, and only listed ones are made."""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec
import pytest

from tandem.frontend.processes import wire
from tandem.frontend.processes.backend_service import BackendService
from tandem.frontend.processes.methods import MethodTable, NotCallable, invocation, method_of
from tandem.frontend.processes.remote import RemoteWorkers
from tandem.frontend.processes.remote_backend import RemoteBackend
from tandem.protocol.digest import CacheScope
from tandem.router.backend import Pins
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend


class Shelf(Protocol):
    async def put(
        self, name: str, scope: CacheScope, count: Annotated[int, msgspec.Meta(ge=1)] = 1, *, is_new: bool = False
    ) -> list[str]: ...

    def forget(self, name: str) -> None: ...


class Ready:
    reason = None


def sent(called: wire.Invocation[msgspec.Struct]) -> wire.Invocation[msgspec.Raw]:
    message = wire.decode_call(wire.encode(wire.Call(0, called)))
    arrived: wire.Invocation[msgspec.Raw] = message.invocation
    return arrived


def call(table: MethodTable, called: wire.Invocation[msgspec.Raw]) -> Any:
    method, implementation, _ = table[called.method]
    return method.bind(implementation, called.arguments)()


def shelf(seen: list[object]) -> MethodTable:
    table = MethodTable()
    table.add_immediate(Shelf.put)(lambda *args, **kwargs: seen.append((args, kwargs)))
    table.add(Shelf.forget)(seen.append)
    return table


def test_arguments_arrive_as_they_were_given_with_the_types_of_the_hints() -> None:
    seen: list[object] = []
    table, scope = shelf(seen), CacheScope("s")
    call(table, sent(invocation(Shelf.put, "a", scope, 3, is_new=True)))
    call(table, sent(invocation(Shelf.put, "b", scope=scope)))
    call(table, sent(invocation(Shelf.forget, "a")))
    assert seen == [(("a", scope, 3), {"is_new": True}), (("b", scope, 1), {"is_new": False}), "a"]


@pytest.mark.parametrize(
    "arguments",
    [["a", "s", 0], ["a", "s", 1, False, "more"], ["a", "s", "3"], ["a", 1], ["a"], [], {"name": "a"}, None, 5],
)
def test_arguments_that_break_the_hints_or_their_bounds_are_refused(arguments: object) -> None:
    raw = wire.decode_call(wire.encode(["Call", 0, ["Shelf.put", arguments]])).invocation
    with pytest.raises(msgspec.DecodeError):
        call(shelf([]), raw)


def test_results_are_decoded_by_the_hints() -> None:
    decode = method_of(Shelf.put).decode_result
    assert decode(msgspec.Raw(wire.encode(["a"]))) == ["a"]
    with pytest.raises(msgspec.DecodeError):
        decode(msgspec.Raw(wire.encode([1])))
    assert method_of(Pins.unpin).decode_result(msgspec.Raw(wire.encode(None))) is None


def test_a_method_is_called_with_all_its_arguments() -> None:
    with pytest.raises(TypeError):
        invocation(Shelf.forget)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["Shelf.keys", "Shelf.__init__", "put", "", "Shelf.put.__call__", "x" * 10_000])
def test_nothing_else_can_be_called(name: str) -> None:
    with pytest.raises(NotCallable, match="may not be called"):
        call(shelf([]), sent(wire.Invocation(name, method_of(Shelf.forget).arguments("a"))))


def test_a_frontend_process_may_call_what_its_backend_does_not_do_itself(tokenizer: Tokenizer) -> None:
    table = BackendService(FakeBackend(tokenizer), Ready(), bytes).methods_for("one")
    protocols = {name.partition(".")[0] for name in table}
    assert protocols == {"Backend", "OperatorApi", "ManagedWorkers", "Pins", "ResponseStore", "DecidingMetrics"}
    state = {"model", "max_model_len", "ready", "reason", "num_open"}
    own = state | {"manager", "cache", "responses", "api_keys", "running", "start", "close"}
    assert public(RemoteBackend) - own == methods(table, "Backend", "OperatorApi", "DecidingMetrics")
    assert public(RemoteWorkers) == methods(table, "ManagedWorkers")


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def methods(table: MethodTable, *protocols: str) -> set[str]:
    """Names of the methods of these Protocols that may be called."""
    return {name.partition(".")[2] for name in table if name.startswith(protocols)}
