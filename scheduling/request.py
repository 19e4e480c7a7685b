"""A request as admission and placement know it: length, block digests, expected answer, and service class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from tandem.protocol.messages import WorkerCard

DEFAULT_TENANT = "default"  # the tenant of requests that name none


class ServiceClass(msgspec.Struct, frozen=True, array_like=True):
    """The tenant of a request, its urgency, its deadline for the first token, and how it wants to be routed."""

    tenant: str = DEFAULT_TENANT
    priority: int = 0  # lower is more urgent, as in vLLM
    ttft_slo_s: float | None = None  # None = the tenant's own SLO; inf = no SLO
    routing: str = ""  # strategy of `protocol/routing.py`; "" = the server's
    session: str = ""  # what the strategy `session` keeps together; "" = none


class PromptDigests(Protocol):
    """Digests of a prompt's full blocks, first block first. Workers of different namespaces hash differently."""

    def of(self, card: WorkerCard) -> Sequence[bytes]:
        """The digests under which a worker with this card caches the prompt."""


class CommonDigests(msgspec.Struct, frozen=True):
    """All workers hash alike."""

    digests: Sequence[bytes]

    def of(self, card: WorkerCard) -> Sequence[bytes]:
        """The same for every worker."""
        return self.digests


NO_DIGESTS = CommonDigests(())
DEFAULT_CLASS = ServiceClass()


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a placement depends on. A struct, because making a frozen dataclass takes ten times as long."""

    num_prompt_tokens: int
    expected_output_tokens: int
    digests: PromptDigests = NO_DIGESTS
    service_class: ServiceClass = DEFAULT_CLASS
    allowed_workers: tuple[str, ...] = ()  # glob patterns of worker ids; () = all workers
    adapter: str = ""  # LoRA adapter; "" = none
    can_hand_over: bool = True  # whether one worker may compute the prompt and another one decode
    generates: bool = True  # whether it decodes at all
    may_cover: bool = False  # whether a prefill worker does all of it while no worker decodes
    may_fall_back: bool = False  # whether a draining worker serves it where no ready one can
    is_resumed: bool = False  # whether its answer has begun and goes on; then a prefill worker will do
    is_admitted: bool = False  # whether its answer was admitted before: it may wait, but is not refused

    @property
    def tenant(self) -> str:
        """The tenant that the request is from."""
        return self.service_class.tenant
