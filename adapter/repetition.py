"""An answer that goes round in circles: a pattern of tokens that stands several times in a row."""

MAX_PATTERN_TOKENS = 32
MIN_REPEATS = 8


class Repetition:
    """Says of each token of an answer whether a pattern of 1 to 32 tokens now stands 8 times in a
    row at its end.

    That is the rule of vLLM's `check_sequence_repetition`; here a token costs one comparison for
    each length of a pattern, however many answers there are to look at.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        # For each length: how many tokens at the end equal the one a pattern before them.
        self._num_equal = [0] * MAX_PATTERN_TOKENS

    def add(self, token_id: int) -> bool:
        """Take the next token of the answer."""
        found = False
        for length in range(1, min(MAX_PATTERN_TOKENS, len(self._token_ids)) + 1):
            equal = self._token_ids[-length] == token_id
            self._num_equal[length - 1] = self._num_equal[length - 1] + 1 if equal else 0
            found = found or self._num_equal[length - 1] >= (MIN_REPEATS - 1) * length
        self._token_ids.append(token_id)
        return found
