"""Predictions of output lengths that a test chooses instead of letting the scheduler learn them."""

from tandem.engine.output_lengths import OutputLengths


class Expects(OutputLengths):
    """Expects every answer to get this many more tokens. With 1, each sequence that has room now is admitted."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens

    def expected_rest(self, num_tokens: int, max_tokens: int) -> int:
        return min(self.num_tokens, max_tokens - num_tokens)


class Endless(Expects):
    """No running answer is expected to end soon enough to promise its seat to another sequence."""

    def share_ending(self, num_tokens: int, num_more: int, max_tokens: int) -> float:
        return 0.0
