"""Expectations of answers' lengths that a test chooses, where the scheduler would learn them."""

from tandem.engine.output_lengths import OutputLengths

__all__ = ["Expects"]


class Expects(OutputLengths):
    """Every answer is expected to get this many more tokens, however many it has. Of 1, what has room now is let in."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def expected_rest(self, num_tokens: int, max_tokens: int) -> int:
        return min(self.num_tokens, max_tokens - num_tokens)
