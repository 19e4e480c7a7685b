"""What an engine's own tiers hold, and what loading from them costs, in the form in which our workers report theirs.

An engine reports no durations of loads. They are learned from first tokens: what a prompt took of which blocks were
loaded, beyond the predicted time to compute the rest. Such a remainder has large errors, and much of a short load is
the engine's own steps. So latency and bandwidth are fitted together, as those of transfers between workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tandem.protocol.load_prior import TIER_PRIORS
from tandem.protocol.messages import DISK_TIER, HOST_TIER, POOL_PLACE, FetchStats, TierLoad, WorkerCard, holder_name
from tandem.scheduling.cost_model import TransferCosts, TransferModel
from tandem.scheduling.placement.prefix_index import PrefixIndex

_TIERS = (HOST_TIER, DISK_TIER)  # fastest first
_TOKEN_BYTES = 128 * 1024  # of KV, where an engine's is not known: a model of 8B parameters in 16 bits
_LEAST_SHARE = 0.25  # of a prediction that one measurement may show: less may remain where the rest was overestimated

TierListener = Callable[[Sequence[TierLoad], FetchStats], None]


class ExpectedLoad(NamedTuple):
    """Blocks [first_block, end_block) of a prompt that an engine should load from its tier: its pool lacks them.

    It loads whatever it finds, whether or not that is faster than computing.
    """

    tier: str
    first_block: int
    end_block: int


class EngineTiers:
    """The tiers of one engine, from the first block that its events put there to the end of its life."""

    def __init__(self, card: WorkerCard, index: PrefixIndex, on_change: TierListener, *, host_bytes: int = 0) -> None:
        """`on_change` gets the tiers, with what loads cost now. `host_bytes`: size of host memory; 0 = not known."""
        self._card = card
        self._index = index
        self._on_change = on_change
        self._block_bytes = card.block_bytes or _TOKEN_BYTES * card.block_size
        self._capacity_blocks = {HOST_TIER: host_bytes // self._block_bytes}
        self._models: dict[str, TransferModel] = {}
        self._loaded_blocks: dict[str, int] = {}

    def __contains__(self, tier: str) -> bool:
        return tier in self._models

    def add(self, tier: str) -> None:
        """Follow a tier from now on."""
        self._index.add_worker(self._holder(tier), self._card.address.epoch)
        self._models[tier] = TransferModel(TIER_PRIORS[tier].bytes_per_s)

    @property
    def holders(self) -> list[str]:
        """Their names in the index."""
        return [self._holder(tier) for tier in self._models]

    def report(self, loaded_tokens: Mapping[str, int] | None = None) -> None:
        """Tell what the tiers hold. `loaded_tokens`: prompt tokens that came from each since the engine's start."""
        if loaded_tokens is not None:
            block_size = self._card.block_size
            self._loaded_blocks = {tier: num_tokens // block_size for tier, num_tokens in loaded_tokens.items()}
        if self._models:
            tiers = [self._load_of(tier, self._models[tier].costs) for tier in _TIERS if tier in self._models]
            self._on_change(tiers, _fetches(self._loaded_blocks))

    def expected(self, digests: Sequence[bytes]) -> ExpectedLoad | None:
        """The load of a prompt with these digests that is sent now, from the tier that has most of it."""
        if not self._models:
            return None
        end_block, tier = max(
            ((self._num_held(tier, digests), tier) for tier in _TIERS if tier in self._models), key=lambda one: one[0]
        )
        first_block = self._num_held(POOL_PLACE, digests)
        return ExpectedLoad(tier, first_block, end_block) if end_block > first_block else None

    def learn(self, load: ExpectedLoad, seconds: float) -> None:
        """A load seems to have taken this long. Nothing is learned if the rest of the prompt took all the time."""
        model, num_bytes = self._models.get(load.tier), (load.end_block - load.first_block) * self._block_bytes
        if model is not None and seconds > 0:
            model.observe(num_bytes, max(seconds, _LEAST_SHARE * model.costs.transfer_s(num_bytes)))
            self.report()

    def _num_held(self, place: str, digests: Sequence[bytes]) -> int:
        return self._index.count_held(self._holder(place), digests, len(digests))

    def _holder(self, place: str) -> str:
        return holder_name(self._card.address.worker_id, place)

    def _load_of(self, tier: str, costs: TransferCosts) -> TierLoad:
        num_blocks = self._index.num_blocks(self._holder(tier))
        return TierLoad(
            name=tier,
            num_blocks=num_blocks,
            capacity_blocks=self._capacity_blocks.get(tier, 0),
            num_hits=self._loaded_blocks.get(tier, 0),
            latency_s=costs.latency_s,
            block_s=costs.byte_s * self._block_bytes,
        )


def _fetches(num_loaded_blocks: dict[str, int]) -> FetchStats:
    """The part of these counts that is known of engines."""
    return FetchStats(
        num_prompts={},
        num_loaded_blocks=num_loaded_blocks,
        num_lent_blocks=0,
        predicted_load_s=0.0,
        actual_load_s=0.0,
        saved_s=0.0,
    )
