"""A JSON schema → the grammar that holds an answer to it, the same for both engines.

The grammar is xgrammar's EBNF. xgrammar and vLLM take JSON schemas too, but read some keywords in
ways that give no valid JSON, or ignore them in silence. Here each is either held to or refused. No
white space stands between values, properties come in the schema's order, and numbers have at
most 15 digits before the point and 6 behind it, so that no answer goes round in them for ever.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapter.errors import UnprocessableError
from adapter.grammar_numbers import LARGEST, integer_expression, number_expression
from adapter.grammar_pattern import PatternError, any_text, pattern_expression
from adapter.reasoning import CLOSE, OPEN, Reasoning

MAX_SCHEMA_BYTES = 64 * 1024
MAX_GRAMMAR_CHARACTERS = 512 * 1024

Schema = Mapping[str, Any]
Path = tuple[str | int, ...]

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema"}
)
DEFINITIONS = ("$defs", "definitions")
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""What is held to, by the type that it belongs to; beside it `enum`, `const`, `anyOf`, `$ref`."""

_ADVICE = {
    "oneOf": "write anyOf, with schemas of which no two hold for one value",
    "allOf": "write all keywords into one schema",
    "format": "write a pattern",
    "multipleOf": "write an enum",
    "uniqueItems": "leave it out",
    "prefixItems": "write an object with a property for each item",
    "patternProperties": "declare each property, or write an array of objects",
    "propertyNames": "declare each property, or write an array of objects",
    "exclusiveMinimum": "write minimum; only an integer may have it",
    "exclusiveMaximum": "write maximum; only an integer may have it",
}


def to_grammar(schema: object, *, reasoning: Reasoning = "none") -> str:
    """The grammar of the answers that are valid for `schema`, its start rule being `root`.

    `reasoning`: "none", or "opened" where the chat template has written `<think>` already and the
    answer begins inside of it, or "optional" where an answer may begin with `<think>`. The schema
    holds for what stands behind `</think>`.

    Raises UnprocessableError, which names the keyword, for what cannot be held to.
    """
    if not isinstance(schema, Mapping):
        raise _refusal((), 'is no JSON object; send a schema such as {"type": "object", …}')
    if len(json.dumps(schema, ensure_ascii=False).encode()) > MAX_SCHEMA_BYTES:
        raise _refusal((), f"is larger than {MAX_SCHEMA_BYTES} bytes; send a smaller one")
    writer = _Writer(schema)
    value = writer.rule(schema, ())
    writer.refuse_circles()
    rules = [f"root ::= {_REASONING[reasoning](value)}", *_reasoning_rules(reasoning)]
    grammar = "\n".join([*rules, *writer.rules]) + "\n"
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise _refusal((), "makes too large a grammar; send a simpler one")
    return grammar


@dataclass
class _Writer:
    """Writes a rule for each schema inside of `root`."""

    root: Schema
    rules: list[str] = field(default_factory=list)
    _references: dict[str, str] = field(default_factory=dict)
    _num_rules: int = 0
    # Which rules a rule may become without a character, and where each stands in the schema.
    _becomes: dict[str, list[str]] = field(default_factory=dict)
    _paths: dict[str, Path] = field(default_factory=dict)

    def rule(self, schema: object, path: Path, name: str | None = None) -> str:
        """The name of the rule for a schema."""
        name = name or self._new_name()
        self._paths[name] = path
        if not isinstance(schema, Mapping):
            raise _refusal(path, f"is {json.dumps(schema)[:40]}; write an object with a type")
        for keyword in ("$ref", "enum", "const", "anyOf"):
            if keyword in schema:
                expression = self._combined(schema, keyword, path, name)
                break
        else:
            expression = self._typed(schema, path)
        self._write(name, expression)
        return name

    def refuse_circles(self) -> None:
        """Refuse schemas that refer to themselves without a value in between."""
        done: set[str] = set()
        for start in self._becomes:
            self._follow(start, (), done)

    def _follow(self, name: str, above: tuple[str, ...], done: set[str]) -> None:
        if name in above:
            raise _refusal(self._paths[name], "refers to itself; let it refer to something else")
        if name in done:
            return
        for other in self._becomes.get(name, ()):
            self._follow(other, (*above, name), done)
        done.add(name)

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"r{self._num_rules}"

    def _write(self, name: str, expression: str) -> None:
        self.rules.append(f"{name} ::= {expression}")

    def _combined(self, schema: Schema, keyword: str, path: Path, name: str) -> str:
        at = (*path, keyword)
        if keyword == "$ref":
            _allow_only(schema, {"$ref"}, path, "beside $ref")
            self._becomes[name] = [self._reference(schema["$ref"], at)]
            return self._becomes[name][0]
        if keyword == "anyOf":
            _allow_only(schema, {"anyOf"}, path, "beside anyOf")
            branches = _list(schema["anyOf"], at)
            self._becomes[name] = [self.rule(one, (*at, i)) for i, one in enumerate(branches)]
            return " | ".join(self._becomes[name])
        _allow_only(schema, {keyword, "type"}, path, f"beside {keyword}")
        values = _list(schema["enum"], at) if keyword == "enum" else [schema["const"]]
        types = _types(schema, path) if "type" in schema else None
        for value in values:
            if types is not None and not any(_has_type(value, one) for one in types):
                raise _refusal(at, f"has {_shown(value)}, which is of no type of its type keyword")
        return " | ".join(_literal(value) for value in values)

    def _reference(self, reference: object, path: Path) -> str:
        """The rule of a definition, written once."""
        if not isinstance(reference, str):
            raise _refusal(path, "is no string; write #/$defs/NAME")
        if reference not in self._references:
            target = self._definition(reference, path)
            self._references[reference] = name = self._new_name()
            at = (
                tuple(reference.removeprefix("#").strip("/").split("/")) if reference != "#" else ()
            )
            self.rule(target, at, name)
        return self._references[reference]

    def _definition(self, reference: str, path: Path) -> object:
        if reference == "#":
            return self.root
        start, _, name = reference.removeprefix("#/").partition("/")
        definitions = self.root.get(start) if start in DEFINITIONS else None
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(definitions, Mapping) or name not in definitions:
            raise _refusal(path, f"is {_shown(reference)}, which is not there; write #/$defs/NAME")
        return definitions[name]

    def _typed(self, schema: Schema, path: Path) -> str:
        types = _types(schema, path)
        known = {"type"}.union(*(KEYWORDS[one] for one in types))
        _allow_only(schema, known, path, f"of type {' or '.join(types)}")
        expressions: dict[str, Callable[[Schema, Path], str]] = {
            "object": self._object,
            "array": self._array,
            "string": _string,
            "integer": _integer,
            "number": _number,
            "boolean": lambda *_: '"true" | "false"',
            "null": lambda *_: '"null"',
        }
        return " | ".join(expressions[one](schema, path) for one in types)

    def _object(self, schema: Schema, path: Path) -> str:
        if schema.get("additionalProperties", False) is not False:
            raise _refusal((*path, "additionalProperties"), "is not false; declare each property")
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            raise _refusal((*path, "properties"), "is missing or no object; declare each property")
        required = _list(schema.get("required", []), (*path, "required"), may_be_empty=True)
        for name in required:
            if name not in properties:
                at = (*path, "required")
                raise _refusal(at, f"has {_shown(name)}, which is not among the properties")
        members = [
            (
                _quoted(json.dumps(name, ensure_ascii=False) + ":")
                + " "
                + self.rule(value, (*path, "properties", name)),
                name in required,
            )
            for name, value in properties.items()
        ]
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """What comes of each member on, without and with one before it: rules from the last on."""
        first = rest = '""'
        for member, is_required in reversed(members):
            written_first, written_rest = f"{member} {rest}", f'"," {member} {rest}'
            if is_required:
                first, rest = self._named(written_first), self._named(written_rest)
            else:
                first = self._named(f"{written_first} | {first}")
                rest = self._named(f"{written_rest} | {rest}")
        return first

    def _named(self, expression: str) -> str:
        name = self._new_name()
        self._write(name, expression)
        return name

    def _array(self, schema: Schema, path: Path) -> str:
        if "items" not in schema:
            raise _refusal((*path, "items"), "is missing; say what the array holds")
        item = self.rule(schema["items"], (*path, "items"))
        low, high = _counts(schema, "minItems", "maxItems", path)
        if high == 0:
            return '"[]"'
        more = f"{{{max(0, low - 1)},{'' if high is None else high - 1}}}"
        filled = f'"[" {item} ("," {item}){more} "]"'
        return filled if low > 0 else f'"[]" | {filled}'


def _string(schema: Schema, path: Path) -> str:
    low, high = _counts(schema, "minLength", "maxLength", path)
    if "pattern" not in schema:
        return _text(any_text(low, high))
    at = (*path, "pattern")
    if "minLength" in schema or "maxLength" in schema:
        raise _refusal(at, "comes beside a length; write the length into the pattern, as {1,80}")
    if not isinstance(schema["pattern"], str):
        raise _refusal(at, "is no string")
    try:
        return _text(pattern_expression(schema["pattern"]))
    except PatternError as error:
        raise _refusal(at, str(error)) from None
    except RecursionError:
        raise _refusal(at, "has groups too deep inside each other") from None


def _text(expression: str) -> str:
    return f"Regex({json.dumps(f'^{chr(34)}{expression}{chr(34)}$')})"


def _integer(schema: Schema, path: Path) -> str:
    low, high = _bound(schema, "minimum", -LARGEST, path), _bound(schema, "maximum", LARGEST, path)
    low = max(low, _bound(schema, "exclusiveMinimum", -LARGEST - 1, path) + 1)
    high = min(high, _bound(schema, "exclusiveMaximum", LARGEST + 1, path) - 1)
    _refuse_empty(low, high, path)
    return integer_expression(low, high)


def _number(schema: Schema, path: Path) -> str:
    low, high = _bound(schema, "minimum", -LARGEST, path), _bound(schema, "maximum", LARGEST, path)
    _refuse_empty(low, high, path)
    return number_expression(low, high)


def _bound(schema: Schema, keyword: str, default: int, path: Path) -> int:
    value = schema.get(keyword, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise _refusal((*path, keyword), f"is {_shown(value)}; write a whole number")
    if abs(value) > LARGEST + 1:
        raise _refusal((*path, keyword), f"is {_shown(value)}; write one of at most 15 digits")
    return int(value)


def _refuse_empty(low: int, high: int, path: Path) -> None:
    if low > high:
        raise _refusal(path, f"allows no number: nothing lies between {low} and {high}")


def _counts(schema: Schema, low: str, high: str, path: Path) -> tuple[int, int | None]:
    counts = []
    for keyword in (low, high):
        value = schema.get(keyword)
        if value is not None or keyword in schema:
            value = _bound(schema, keyword, 0, path)
            if not 0 <= value <= 1_000_000:
                raise _refusal((*path, keyword), f"is {value}; write one from 0 to 1000000")
        counts.append(value)
    if counts[1] is not None and (counts[0] or 0) > counts[1]:
        raise _refusal((*path, low), f"is larger than {high}")
    return counts[0] or 0, counts[1]


def _types(schema: Schema, path: Path) -> list[str]:
    at = (*path, "type")
    if "type" not in schema:
        raise _refusal(at, _no_type(schema))
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for one in types:
        if not isinstance(one, str) or one not in KEYWORDS:
            raise _refusal(at, f"is {_shown(one)}; the types are {', '.join(KEYWORDS)}")
    if not types:
        raise _refusal(at, "is empty")
    return types


def _no_type(schema: Schema) -> str:
    """A schema without a type often has a keyword that is not known in its place."""
    for keyword in schema:
        if keyword in _ADVICE:
            return f"is missing, and {keyword} is not held to here; {_ADVICE[keyword]}"
    return "is missing; write a type, an enum, a const, an anyOf or a $ref"


def _allow_only(schema: Schema, known: set[str], path: Path, where: str) -> None:
    for keyword in schema:
        if keyword in known or keyword in ANNOTATIONS or (not path and keyword in DEFINITIONS):
            continue
        advice = _ADVICE.get(keyword, f"known {where} are {', '.join(sorted(known))}")
        raise _refusal((*path, keyword), f"is not held to {where}; {advice}")


def _list(value: object, path: Path, *, may_be_empty: bool = False) -> list[Any]:
    if not isinstance(value, list) or not (value or may_be_empty):
        raise _refusal(path, "is no list, or an empty one")
    return value


def _has_type(value: object, name: str) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, kinds[name])


def _literal(value: object) -> str:
    return _quoted(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def _quoted(text: str) -> str:
    """The expression of exactly this text, which has no control characters."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _refusal(path: Path, why: str) -> UnprocessableError:
    parts = [str(part)[:80] for part in ("json_schema", *path)]
    where = ".".join(parts)
    return UnprocessableError(f"{where} {why}.", code="invalid_schema", field=where)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, default=repr)
    return text if len(text) <= 60 else text[:60] + "…"


# Reasoning

_REASONING: Mapping[str, Callable[[str], str]] = {
    "none": lambda value: value,
    "opened": lambda value: f"thought {value}",
    "optional": lambda value: f"({_quoted(OPEN)} thought)? {value}",
}


def _reasoning_rules(reasoning: Reasoning) -> Iterable[str]:
    """Any text up to `</think>`, and at most two white-space characters behind it.

    A `<` starts the tag anew wherever it stands, and what has begun like the tag may go on
    otherwise.
    """
    if reasoning == "none":
        return []
    tag = CLOSE[1:]
    anew = "|".join(f"{tag[:n]}<" for n in range(1, len(tag)))
    otherwise = "|".join(f"{tag[:n]}[^<{tag[n]}]" for n in range(len(tag)))
    begun = f"<(?:<|{anew})*"
    thought = f"^(?:[^<]|{begun}(?:{otherwise}))*{begun}{tag}[ \n]{{0,2}}$"
    return [f"thought ::= Regex({json.dumps(thought)})"]
