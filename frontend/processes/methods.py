"""Methods that another process may call: how a call of one is written, and what is called for it.

A method is one of a Protocol, such as `Backend.explain`. A call is its name and its arguments in order; msgspec decodes
arguments and results by the method's type hints, with the bounds that these carry.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_type_hints

import msgspec

from tandem.frontend.processes.wire import Invocation
from tandem.protocol.decoding import safe_decoder

P = ParamSpec("P")
T = TypeVar("T")


class Method:
    """One method of a Protocol: its name, and the types of its arguments and of its result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        _, *parameters = inspect.signature(function).parameters.values()  # all but `self`
        self._hints = get_type_hints(function, include_extras=True)
        self._keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        self._num_positional = len(parameters) - len(self._keywords)
        self.name = function.__qualname__
        self.short_name = function.__name__
        self.is_coroutine = inspect.iscoroutinefunction(function)
        fields = [_field(one, self._hints[one.name]) for one in parameters]
        self.arguments = msgspec.defstruct(self.name, fields, array_like=True, frozen=True, forbid_unknown_fields=True)
        self._decode_arguments = safe_decoder(self.arguments)

    @functools.cached_property
    def decode_result(self) -> Callable[[msgspec.Raw], Any]:
        """Decodes a result. Raises `msgspec.DecodeError`."""
        return safe_decoder(self._hints["return"])

    def bind(self, implementation: Callable[..., T], arguments: msgspec.Raw) -> partial[T]:
        """A call of an implementation of the method. Raises `msgspec.DecodeError` if the arguments do not fit."""
        values = msgspec.structs.astuple(self._decode_arguments(arguments))
        num = self._num_positional
        return partial(implementation, *values[:num], **dict(zip(self._keywords, values[num:], strict=True)))


def _field(parameter: inspect.Parameter, hint: Any) -> tuple[str, Any] | tuple[str, Any, Any]:
    """The parameter as a field of a struct."""
    has_default = parameter.default is not parameter.empty
    return (parameter.name, hint, parameter.default) if has_default else (parameter.name, hint)


@functools.cache
def method_of(function: Callable[..., Any]) -> Method:
    """The method that this function of a Protocol declares."""
    return Method(function)


def invocation(
    function: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs
) -> Invocation[msgspec.Struct]:
    """A call of a Protocol's method, to be sent."""
    method = method_of(function)
    return Invocation(method.name, method.arguments(*args, **kwargs))


class NotCallable(msgspec.DecodeError):
    """This method may not be called."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name[:100]!r} may not be called")


class Binding(NamedTuple):
    """A method that may be called, and the function that is called for it."""

    method: Method
    implementation: Callable[..., Any]
    is_immediate: bool  # whether it is called before the next message is read; otherwise it gets a task of its own


class MethodTable(dict[str, Binding]):
    """The methods that a process may call, by name. Nothing else can be called."""

    def __missing__(self, name: str) -> Binding:
        raise NotCallable(name)

    def add(self, function: Callable[Concatenate[Any, P], T]) -> Callable[[Callable[P, T]], None]:
        """Let a method be called: `add(Backend.explain)(backend.explain)`. A coroutine gets a task of its own.

        In two steps, because mypy then demands that both have the same arguments and results.
        """
        method = method_of(function)
        return partial(self._add, method, not method.is_coroutine)

    def add_immediate(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
    ) -> Callable[[Callable[P, T]], None]:
        """Let a coroutine method be called whose implementation never waits: calls keep the order of the messages."""
        return partial(self._add, method_of(function), True)

    def _add(self, method: Method, is_immediate: bool, implementation: Callable[..., Any]) -> None:
        self[method.name] = Binding(method, implementation, is_immediate)
