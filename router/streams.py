"""What comes one after the other for one reader, who waits for it or has it handed over as it comes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Self, TypeVar

from tandem.router.inbox import Inbox

__all__ = ["GeneratorStream", "InboxStream", "Stream"]

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741


class Stream(ABC, Generic[T]):
    """Items up to a last one, or an error. Whoever gets one closes it by `aclose`, on every path."""

    def __aiter__(self) -> Self:
        """It can be read once."""
        return self

    @abstractmethod
    async def __anext__(self) -> T:
        """The next item, in the reader's task."""

    @abstractmethod
    async def aclose(self) -> None:
        """Give up what has not come. May be called again."""

    async def pour(self, into: Callable[[T], bool]) -> bool:
        """Give `into` each item, until it returns False or the last was given. Returns whether that was so.

        Where it can be, `into` is called by what brings the item: to wake the reader's task for it would cost as much
        as all else that is done with a token. What it raises comes out here.
        """
        async for item in self:
            if not into(item):
                return False
        return True


class GeneratorStream(Stream[T]):
    """What a generator yields."""

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator

    async def __anext__(self) -> T:
        return await anext(self._generator)

    async def aclose(self) -> None:
        """Close the generator."""
        await self._generator.aclose()


class InboxStream(Stream[T], Generic[I, T]):
    """What is made of the items of an inbox. An error, or being read to the end, closes it."""

    def __init__(self, inbox: Inbox[I]) -> None:
        self._inbox = inbox
        self._due: deque[T] = deque()  # made, and not given to the reader yet
        self._error: Exception | None = None  # comes after these
        self._has_ended = False  # so does nothing
        self._has_begun = False

    async def __anext__(self) -> T:
        try:
            await self._begin_once()
            while not self._due:
                if not self._is_more():
                    raise StopAsyncIteration
                self._begin_wait()
                items = await self._inbox.take()
                self._end_wait()
                self._make(items)
            return self._due.popleft()
        except BaseException:
            self._has_ended = True
            self.close()
            raise

    async def pour(self, into: Callable[[T], bool]) -> bool:
        """As said above: `into` is called in the inbox's turn."""

        def take(items: list[I]) -> bool:
            self._begin_wait()
            self._make(items)
            return self._give(into)

        try:
            await self._begin_once()
            if self._give(into):
                self._begin_wait()
                await self._inbox.pour(take)
                self._end_wait()
            is_over = self._has_ended and self._error is None and not self._due
            if is_over:
                self.close()
            return is_over  # NOTE: an error behind what the reader has taken is for the next call
        except BaseException:
            self._has_ended = True
            self.close()
            raise

    async def aclose(self) -> None:
        """Give it all back."""
        self._has_ended = True
        self._due.clear()
        self.close()

    @abstractmethod
    async def _begin(self) -> None:
        """Have the inbox filled."""

    @abstractmethod
    def _make(self, items: list[I]) -> None:
        """Make what is due of these, and note an error or the end."""

    @abstractmethod
    def close(self) -> None:
        """Give back what this has. May be called again, and before it has begun."""

    def _begin_wait(self) -> None:
        """Something has to come from now on."""

    def _end_wait(self) -> None:
        """Nothing has to come for a while: nobody waits for it."""

    async def _begin_once(self) -> None:
        if not self._has_begun and not self._has_ended:
            self._has_begun = True
            await self._begin()

    def _give(self, into: Callable[[T], bool]) -> bool:
        """Give what is due; whether more may be given."""
        while self._due:
            if not into(self._due.popleft()):
                return False
        return self._is_more()

    def _is_more(self) -> bool:
        """Whether something can come behind what is due. Raises the error that does."""
        if self._error is not None:
            raise self._error
        return not self._has_ended
