"""Regular expressions of JSON schemas → xgrammar's, for the text of a JSON string.

xgrammar makes an automaton of a regular expression, which it follows far faster than rules.

The expression matches the string as it stands in JSON: a quote in it is `\\"`, and raw control
characters are none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # of code points, inclusive, sorted, apart

MAX_REPEATS = 4096
REPEATS_AT_ONCE = 100  # xgrammar (0.2.8) makes slow rules of longer repeats
# What stands in a JSON string as itself; C1 controls and halves of characters stand in none here.
PLAIN: Ranges = (
    (0x20, 0x21),
    (0x23, 0x5B),
    (0x5D, 0x7E),
    (0xA0, 0x7FF),
    (0x800, 0xD7FF),
    (0xE000, 0xFFFD),
    (0x10000, 0x10FFFF),
)
ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
ASCII_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
SPACE: Ranges = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
EVERYTHING: Ranges = ((0, 0x10FFFF),)


class PatternError(ValueError):
    """Says what of a pattern cannot be held to, and what to write in its place."""


def any_text(min_length: int = 0, max_length: int | None = None) -> str:
    """The expression of a string with so many characters."""
    return _repeated(_characters(EVERYTHING), min_length, max_length)


def pattern_expression(pattern: str) -> str:
    """The expression of a pattern. Raises PatternError.

    Known are literals, `.`, classes, `\\d \\w \\s` and their opposites, groups, `|`, greedy and
    lazy quantifiers, and `^` and `$` around the whole or around an alternative.
    """
    parser = _Parser(pattern)
    expression = parser.alternatives(outermost=True)
    if not parser.at_end:
        raise PatternError(f"has an unmatched ')' at character {parser.at}")
    return expression


@dataclass
class _Parser:
    """Recursive descent over a pattern, which makes the expression on the way."""

    text: str
    at: int = 0

    @property
    def at_end(self) -> bool:
        return self.at >= len(self.text)

    def alternatives(self, *, outermost: bool = False) -> str:
        parts = [self._sequence(outermost)]
        while self._take("|"):
            parts.append(self._sequence(outermost))
        return f"(?:{'|'.join(parts)})"

    def _sequence(self, outermost: bool) -> str:
        parts: list[str] = []
        if outermost and not self._take("^"):
            parts.append(any_text())
        while not self.at_end and self._peek() not in "|)":
            if outermost and self._peek() == "$" and self.text[self.at + 1 : self.at + 2] in "|":
                self.at += 1
                return "".join(parts)
            parts.append(self._quantified(self._atom()))
        if outermost:
            parts.append(any_text())
        return "".join(parts)

    def _atom(self) -> str:
        start = self.at
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class(start)
        if character == ".":
            return _characters(_without(EVERYTHING, LINE_ENDS))
        if character == "\\":
            return _characters(self._escape())
        if character in "^$":
            raise PatternError(f"has {character!r} inside it; anchors stand at its ends only")
        if character in "*+?{":
            raise PatternError(f"has nothing to repeat at character {start}")
        return _characters(_one(character))

    def _group(self) -> str:
        if self._take("?") and not self._take(":"):
            raise PatternError("has a look-around or a named group; only (…) and (?:…) are known")
        expression = self.alternatives()
        if not self._take(")"):
            raise PatternError("lacks a ')'")
        return expression

    def _class(self, start: int) -> str:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            if self.at_end:
                raise PatternError(f"lacks the ']' of the class at character {start}")
            ranges += self._class_item()
        chosen = _union(ranges)
        return _characters(_without(EVERYTHING, chosen) if negated else chosen)

    def _class_item(self) -> Ranges:
        first = self._class_atom()
        follows = self.text[self.at : self.at + 2]
        if follows[:1] != "-" or follows == "-]" or len(follows) < 2:
            return first
        self.at += 1
        last = self._class_atom()
        if not (_is_one(first) and _is_one(last)) or first[0][0] > last[0][0]:
            raise PatternError(f"has a range out of order before character {self.at}")
        return ((first[0][0], last[0][0]),)

    def _class_atom(self) -> Ranges:
        character = self._next()
        if character == "\\":
            return _one("\b") if self._take("b") else self._escape()
        if character == "[":
            raise PatternError("has '[' inside a class; write \\[")
        return _one(character)

    def _escape(self) -> Ranges:
        if self.at_end:
            raise PatternError("ends with a backslash")
        character = self._next()
        if character in "dws":
            return {"d": DIGITS, "w": WORD, "s": ASCII_SPACE}[character]
        if character in "DWS":
            return _without(EVERYTHING, {"D": DIGITS, "W": WORD, "S": SPACE}[character])
        if character in "nrtfv":
            return _one({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}[character])
        if character in "xu":
            return self._code_point(2 if character == "x" else 4)
        if character.isalnum():
            raise PatternError(f"has the escape \\{character}, which is not known here")
        return _one(character)

    def _code_point(self, num_digits: int) -> Ranges:
        digits = self.text[self.at : self.at + num_digits]
        self.at += num_digits
        if len(digits) < num_digits or not all(d in "0123456789abcdefABCDEF" for d in digits):
            raise PatternError(f"has an escape without its {num_digits} hexadecimal digits")
        return ((int(digits, 16), int(digits, 16)),)

    def _quantified(self, atom: str) -> str:
        if self.at_end or self._peek() not in "*+?{":
            return atom
        character = self._next()
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(character) or self._bounds()
        self._take("?")  # lazy: the same strings
        if not self.at_end and self._peek() in "*+?{":
            raise PatternError(f"has nothing to repeat at character {self.at}")
        return _repeated(atom, *bounds)

    def _bounds(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.at)
        low, comma, high = self.text[self.at : max(end, self.at)].partition(",")
        numbers = [low, high] if high else [low]
        if end < 0 or not all(n.isascii() and n.isdigit() and len(n) < 7 for n in numbers):
            raise PatternError(f"has '{{' without numbers at character {self.at}; write \\{{")
        self.at = end + 1
        bounds = (int(low), int(high) if high else None if comma else int(low))
        if max(filter(None, bounds), default=0) > MAX_REPEATS:
            raise PatternError(f"repeats more than {MAX_REPEATS} times")
        if bounds[1] is not None and bounds[0] > bounds[1]:
            raise PatternError(f"has the numbers of {{{low},{high}}} out of order")
        return bounds

    def _peek(self) -> str:
        return self.text[self.at]

    def _next(self) -> str:
        if self.at_end:
            raise PatternError("ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _take(self, character: str) -> bool:
        if self.at_end or self._peek() != character:
            return False
        self.at += 1
        return True


def _repeated(atom: str, minimum: int, maximum: int | None) -> str:
    if maximum is None:
        return _repeated(atom, minimum, minimum) + f"{atom}*" if minimum else f"{atom}*"
    if maximum <= REPEATS_AT_ONCE:
        return f"{atom}{{{minimum},{maximum}}}"
    head = f"{atom}{{{REPEATS_AT_ONCE}}}"
    rest = _repeated(atom, max(0, minimum - REPEATS_AT_ONCE), maximum - REPEATS_AT_ONCE)
    if minimum >= REPEATS_AT_ONCE:
        return head + rest
    return f"(?:{atom}{{{minimum},{REPEATS_AT_ONCE - 1}}}|{head}{rest})"


def _characters(ranges: Ranges) -> str:
    """One character of these, as it stands in a JSON string."""
    plain = _without(PLAIN, _without(EVERYTHING, ranges))
    escapes = [letter for one, letter in ESCAPES.items() if _holds(ranges, ord(one))]
    # Two classes: a range across 0x800, or two that meet there, would let in longer spellings of
    # what is below (xgrammar 0.2.8).
    halves = ([pair for pair in plain if pair[0] < 0x800], [p for p in plain if p[0] >= 0x800])
    parts = [f"[{''.join(_class_range(*pair) for pair in half)}]" for half in halves if half]
    if escapes:
        parts.append(f"\\\\[{''.join(_class_character(ord(one)) for one in escapes)}]")
    if not parts:
        raise PatternError("asks for a character that no answer can have (a control character)")
    return parts[0] if len(parts) == 1 and plain else f"(?:{'|'.join(parts)})"


def _class_range(first: int, last: int) -> str:
    if first == last:
        return _class_character(first)
    return f"{_class_character(first)}-{_class_character(last)}"


def _class_character(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\u{{{code:x}}}"


def _one(character: str) -> Ranges:
    return ((ord(character), ord(character)),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _holds(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def _without(ranges: Ranges, removed: Sequence[tuple[int, int]]) -> Ranges:
    left = list(ranges)
    for first, last in removed:
        left = [
            piece
            for start, end in left
            for piece in ((start, min(end, first - 1)), (max(start, last + 1), end))
            if piece[0] <= piece[1]
        ]
    return tuple(left)
