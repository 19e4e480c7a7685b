"""Requests that other clients send to an engine, booked as if they were ours.

An engine reports how many requests it has, not how long they are: they are assumed to be as long as ours on average.
"""

from __future__ import annotations

from tandem.scheduling.admission import answer_lengths
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry

MAX_FOREIGN_BOOKINGS = 512  # per engine
FIRST_GUESS_TOKENS = 256.0  # length of a prompt until prompts have been seen


class MeanLengths:
    """Moving means of the lengths of prompts and answers."""

    def __init__(self) -> None:
        self.mean_prompt_tokens = FIRST_GUESS_TOKENS
        self.mean_output_tokens = answer_lengths.FIRST_GUESS_TOKENS

    def note(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a request of these lengths that has ended."""
        weight = answer_lengths.NEWEST_WEIGHT
        self.mean_prompt_tokens += weight * (num_prompt_tokens - self.mean_prompt_tokens)
        self.mean_output_tokens += weight * (num_output_tokens - self.mean_output_tokens)


class ForeignLoad:
    """The bookings for one engine's foreign requests."""

    def __init__(self, engine: str, registry: Registry, lengths: MeanLengths) -> None:
        self._engine = engine
        self._registry = registry
        self._lengths = lengths
        self._bookings: list[Booking] = []  # oldest first

    def __len__(self) -> int:
        return len(self._bookings)

    def update(self, num_requests: int, num_waiting: int) -> None:
        """The engine has `num_requests` foreign requests. `num_waiting` is the number it reports, ours included.

        Engines serve in order of arrival: the oldest requests end first, and the newest ones wait.
        """
        num_requests = max(0, min(num_requests, MAX_FOREIGN_BOOKINGS))
        num_prompt = round(self._lengths.mean_prompt_tokens)
        num_kv = round(self._lengths.mean_prompt_tokens + self._lengths.mean_output_tokens)
        while len(self._bookings) > num_requests:
            self._bookings.pop(0).release()
        while len(self._bookings) < num_requests:
            self._bookings.append(
                self._registry.reserve(RequestLoad(self._engine, self._engine, num_prompt, 0, num_kv))
            )
        for booking in self._bookings[: max(0, num_requests - num_waiting)]:
            booking.prefill_done()

    def clear(self) -> None:
        """Give all bookings back."""
        for booking in self._bookings:
            booking.release()
        self._bookings.clear()
