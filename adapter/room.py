"""How much of one thing all requests together may hold."""

from adapter.errors import TooLargeError, UnavailableError


class Room:
    """Bytes that are taken and given back, at most `max_bytes` of them; `name` is what they are."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take them, or raise: TooLargeError for what never fits, UnavailableError of code
        `queue_full` for what does not fit now. Taking 0 bytes asks whether any are left."""
        if num_bytes > self._max_bytes:
            raise TooLargeError(
                f"{self._name} may have {self._max_bytes} bytes and these have {num_bytes}; send "
                "less at once"
            )
        if self.held_bytes + max(1, num_bytes) > self._max_bytes:
            raise UnavailableError(
                f"{self._name} of all requests together may have {self._max_bytes} bytes, and that "
                "is reached; try again in a few seconds, or send less at once",
                code="queue_full",
            )
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes
