"""The text of an answer while its tokens come: only what no later token can change."""

from collections.abc import Callable, Sequence

from adapter.reasoning import CLOSE, OPEN, split_reasoning

_INCOMPLETE = "\ufffd"  # at the end: the bytes of a character whose rest is still to come


class TextStream:
    """Turns token ids into pieces of text that together are the answer's response.

    `decode` makes the text of some token ids. Reasoning before the response is left out, and so no
    piece comes until it is sure that there is none, or where it ends.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, opened: bool) -> None:
        self._decode = decode
        self._opened = opened
        self.start_over()

    def start_over(self) -> None:
        self._token_ids: list[int] = []
        # The tokens before `_read` are told; those from `_prefix` on are decoded again with the
        # next ones, since some decoders treat the first token of a text otherwise.
        self._prefix = self._read = 0
        self._text = ""
        self._is_response = False
        self.told = ""

    def add(self, token_ids: Sequence[int]) -> str:
        """The next piece of the response, often empty."""
        self._token_ids.extend(token_ids)
        piece = self._next_piece()
        if not piece:
            return ""
        if not self._is_response:
            self._text += piece
            piece = self._response()[len(self.told) :]
        self.told += piece
        return piece

    def rest(self, response: str) -> str | None:
        """What is left to tell of the whole response; None where something else was told."""
        return response[len(self.told) :] if response.startswith(self.told) else None

    def _next_piece(self) -> str:
        before = self._decode(self._token_ids[self._prefix : self._read])
        now = self._decode(self._token_ids[self._prefix :])
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return now[len(before) :]

    def _response(self) -> str:
        """The response in what was decoded so far."""
        begun = self._text.lstrip()
        thinks = self._opened or begun.startswith(OPEN)
        is_open = CLOSE not in begun if thinks else OPEN.startswith(begun)
        if is_open:
            return ""
        _, response = split_reasoning(self._text, opened=self._opened)
        self._is_response = not thinks or bool(response)
        return response
