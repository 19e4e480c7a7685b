"""Reading streams item by item, in the test's task."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar

from tandem.router.streams import Stream

T = TypeVar("T")


class Pulled(Generic[T]):
    """A stream as an async iterator."""

    def __init__(self, stream: Stream[T]) -> None:
        self._stream = stream
        self._taken: deque[T] = deque()

    def __aiter__(self) -> Pulled[T]:
        return self

    async def __anext__(self) -> T:
        if not self._taken:
            self._taken.extend(await self._stream.take())
        if not self._taken:
            raise StopAsyncIteration
        return self._taken.popleft()

    async def aclose(self) -> None:
        await self._stream.aclose()


class GeneratorStream(Stream[T]):
    """What a generator yields."""

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator

    async def read_into(self, sink: Callable[[list[T]], bool]) -> bool:
        async for item in self._generator:
            if not sink([item]):
                return False
        return True

    async def aclose(self) -> None:
        await self._generator.aclose()
