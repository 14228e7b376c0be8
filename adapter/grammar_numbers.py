"""Bounded numbers as expressions of xgrammar's EBNF: digits that spell what lies in a range."""

MAX_DIGITS = 15  # so that every reader's float64 holds the number as it was written
MAX_DECIMALS = 6
LARGEST = 10**MAX_DIGITS - 1

_FRACTION = f'("." [0-9]{{1,{MAX_DECIMALS}}})?'
_NO_FRACTION = f'("." "0"{{1,{MAX_DECIMALS}}})?'


def integer_expression(low: int, high: int) -> str:
    """The integers from `low` to `high`, without leading zeros or minus zero."""
    parts = []
    if low < 0:
        parts += [f'"-" {digits}' for digits in _between(max(1, -high), -low)]
    if high >= 0:
        parts += _between(max(0, low), high)
    return f"({' | '.join(parts)})"


def number_expression(low: int, high: int) -> str:
    """The decimal numbers from `low` to `high` with up to 6 decimals."""
    parts = []
    if low < 0:
        parts += [f'"-" {magnitude}' for magnitude in _magnitudes(max(0, -high), -low)]
    if high >= 0:
        parts += _magnitudes(max(0, low), high)
    return f"({' | '.join(parts)})"


def _magnitudes(low: int, high: int) -> list[str]:
    whole = [f"{_exactly(str(high))} {_NO_FRACTION}"]
    if low < high:
        whole.append(f"({' | '.join(_between(low, high - 1))}) {_FRACTION}")
    return whole


def _between(low: int, high: int) -> list[str]:
    """Alternatives for the numbers from `low` to `high`, neither below 0."""
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = min(high, 10**length - 1)
        parts += _same_length(str(first), str(last))
    return parts


def _same_length(first: str, last: str) -> list[str]:
    if not first:
        return ['""']
    if set(first[1:]) <= {"0"} and set(last[1:]) <= {"9"}:
        return [f"[{first[0]}-{last[0]}]" + _any_digits(len(first) - 1)]
    if first[0] == last[0]:
        return [f"{_exactly(first[0])} {rest}" for rest in _same_length(first[1:], last[1:])]
    nines, zeros = "9" * (len(first) - 1), "0" * (len(first) - 1)
    parts = [f"{_exactly(first[0])} {rest}" for rest in _same_length(first[1:], nines)]
    if int(last[0]) - int(first[0]) > 1:
        parts.append(f"[{int(first[0]) + 1}-{int(last[0]) - 1}]" + _any_digits(len(zeros)))
    return parts + [f"{_exactly(last[0])} {rest}" for rest in _same_length(zeros, last[1:])]


def _any_digits(count: int) -> str:
    return f" [0-9]{{{count}}}" if count else ""


def _exactly(digits: str) -> str:
    return f'"{digits}"'
