"""Expected lengths of answers."""

from __future__ import annotations

from tandem.scheduling.lru_dict import LruDict

FIRST_GUESS_TOKENS = 128.0
NEWEST_WEIGHT = 0.05  # weight of the newest answer in the moving means
MAX_TENANTS = 4096  # tenants whose mean is remembered: clients may name any number of them


class AnswerLengths:
    """The moving mean of each tenant's answers, so that each tenant pays for its own lengths. In tokens."""

    def __init__(self) -> None:
        self.mean_tokens = FIRST_GUESS_TOKENS  # over all tenants
        self._means = LruDict[str, float](MAX_TENANTS)

    def expected(self, tenant: str, max_tokens: int) -> int:
        """Expected length of the tenant's next answer, which is limited to `max_tokens`."""
        return max(1, min(max_tokens, round(self._means.get(tenant, self.mean_tokens))))

    def note(self, tenant: str, num_tokens: int) -> None:
        """Learn from an answer that ended by itself."""
        mean = self._means.get(tenant, self.mean_tokens)
        self._means[tenant] = mean + NEWEST_WEIGHT * (num_tokens - mean)
        self.mean_tokens += NEWEST_WEIGHT * (num_tokens - self.mean_tokens)
