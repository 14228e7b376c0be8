"""The settings: the only reader of the environment, each setting declared once.

A setting `max_prompts` is the environment variable `ADAPTER_MAX_PROMPTS`.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from adapter.errors import SettingsError
from adapter.keys import key_digest
from adapter.presets import Preset, read_presets

PREFIX = "ADAPTER_"
CLIENT_KEY = PREFIX + "CLIENT_KEY"  # of `python -m adapter report`: a server has no use for it
FALLBACK_USD_PER_SECOND = 0.000583  # an A100 40 GB

MIB = 2**20
GIB = 2**30
_KEY = re.compile(r"[!-+\--~]{1,512}")
_KEY_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_UNIT_BYTES = {"": 1, "KiB": 2**10, "MiB": MIB, "GiB": GIB}

RESERVED_ENGINE_ARGS: Mapping[str, str] = {
    "model": "set ADAPTER_MODEL",
    "model_weights": "set ADAPTER_MODEL",
    "hf_config_path": "set ADAPTER_MODEL",
    "revision": "set ADAPTER_REVISION",
    "code_revision": "set ADAPTER_REVISION",
    "tokenizer_revision": "set ADAPTER_REVISION",
    "dtype": "set ADAPTER_DTYPE",
    "max_model_len": "set ADAPTER_MAX_MODEL_LEN",
    "max_num_seqs": "set ADAPTER_MAX_NUM_SEQS",
    "max_num_queued_reqs": "set ADAPTER_MAX_QUEUED",
    "max_num_queued_tokens": "set ADAPTER_MAX_QUEUED",
    "tokenizer": "prompts are tokenised with the checkpoint's own",
    "tokenizer_mode": "prompts are tokenised with the checkpoint's own",
    "skip_tokenizer_init": "the engine's processor needs the tokenizer",
    "enable_prefix_caching": "the prompts about one song share its prefix",
    "disable_log_stats": "answers report cached tokens from these statistics",
    "enable_log_requests": "prompts never reach the log",
    "limit_mm_per_prompt": "a prompt hears one song",
    "language_model_only": "the song has to be encoded",
    "mm_encoder_only": "the answer has to be decoded",
    "mm_processor_kwargs": "features are made as the checkpoint's processor makes them",
    "generation_config": "no value of generation_config.json applies unless it is sent",
    "override_generation_config": "no value applies unless it is sent",
    "model_impl": "the adapter brings the model's class",
    "model_class_overrides": "the adapter brings the model's class",
    "runner": "the adapter generates text",
    "convert": "the adapter generates text",
    "reasoning_parser": "the adapter splits reasoning from response",
    "structured_outputs_config": "the adapter sets it for valid JSON",
}
"""Keys that ADAPTER_ENGINE_ARGS may not hold, with the reason."""

_ELSEWHERE: Mapping[str, str] = {
    "ADAPTER_HOST": "give --host on the command line",
    "ADAPTER_PORT": "give --port on the command line (Kubernetes sets it for a service named "
    "'adapter': say enableServiceLinks: false)",
}


class _ExpectedError(ValueError):
    """Says what was expected where the kind's own words are not enough."""


@dataclass(frozen=True)
class _Kind:
    """How a variable's text becomes a value: `parse` raises ValueError where it cannot."""

    parse: Callable[[str], Any]
    expected: str
    secret: bool = False


def _text(text: str) -> str:
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError
    return text


def _text_or_nothing(text: str) -> str | None:
    return _text(text) if text else None


def _choice(*names: str) -> _Kind:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError
        return text.lower()

    return _Kind(parse, "one of " + ", ".join(names))


def _integer(minimum: int, maximum: int) -> _Kind:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
            raise ValueError
        return int(text)

    return _Kind(parse, f"an integer from {minimum} to {maximum}")


def _number(minimum: float, maximum: float) -> _Kind:
    def parse(text: str) -> float:
        if not re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
            raise ValueError
        if not minimum <= float(text) <= maximum:
            raise ValueError
        return float(text)

    return _Kind(parse, f"a number from {minimum:g} to {maximum:g}")


def _size(maximum_bytes: int, minimum_bytes: int = 1) -> _Kind:
    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,15}) ?(|KiB|MiB|GiB)", text)
        if not match:
            raise ValueError
        size_bytes = int(match[1]) * _UNIT_BYTES[match[2]]
        if not minimum_bytes <= size_bytes <= maximum_bytes:
            raise ValueError
        return size_bytes

    expected = f"bytes, or a number of KiB, MiB or GiB (64MiB), up to {maximum_bytes // MIB}MiB"
    return _Kind(parse, expected)


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _hosts(text: str) -> tuple[str, ...]:
    """Host names, each maybe with `*.` in front for all its subdomains, or a `:port` behind."""
    hosts = tuple(host.strip().lower() for host in text.split(","))
    form = r"(\*\.)?[a-z0-9_]([a-z0-9._-]*[a-z0-9])?(:[0-9]{1,5})?"
    if not all(re.fullmatch(form, host) for host in hosts):
        raise ValueError
    return hosts


def _engine_args(text: str) -> dict[str, Any]:
    engine_args = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(engine_args, dict):
        raise ValueError
    for key in engine_args:
        if key in RESERVED_ENGINE_ARGS:
            raise _ExpectedError(f"an object without {key!r}: {RESERVED_ENGINE_ARGS[key]}")
    return engine_args


def _refuse_constant(name: str) -> None:
    raise _ExpectedError(f"JSON, in which there is no {name}")


def _api_keys(text: str) -> dict[bytes, str]:
    """The name of each key by the key's SHA-256; a name may have several keys, to replace one."""
    names: dict[bytes, str] = {}
    for pair in text.split(","):
        name, colon, key = pair.strip().partition(":")
        if not colon or not _KEY_NAME.fullmatch(name):
            raise ValueError
        if not _KEY.fullmatch(key):
            raise ValueError
        digest = key_digest(key)
        if digest in names:
            raise _ExpectedError(f"keys that differ: {name!r} has one that stands there twice")
        names[digest] = name
    return names


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(_KEY_NAME.fullmatch(name) for name in names):
        raise ValueError
    return names


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in text.split(","))
    form = r"\*|https?://[A-Za-z0-9.\[\]:-]+"
    if not all(re.fullmatch(form, origin) for origin in origins):
        raise ValueError
    return origins


def _presets(text: str) -> tuple[Preset, ...]:
    try:
        return read_presets(Path(_text(text)))
    except ValueError as error:
        raise _ExpectedError(str(error)) if str(error) else error from None


_TEXT = _Kind(_text, "a text of one line without spaces around it")
_PATH_OR_NOTHING = _Kind(_text_or_nothing, "a file's path without spaces around it, or nothing")
_BOOLEAN = _Kind(_boolean, "true or false")
_HOSTS = _Kind(_hosts, "host names with commas between them (a.example.com,b.example.com)")
_ENGINE_ARGS = _Kind(_engine_args, 'a JSON object such as {"gpu_memory_utilization": 0.9}')
_API_KEYS = _Kind(
    _api_keys,
    "name:key pairs with commas between them, a key of visible ASCII without commas; or it unset, "
    "and everybody may ask",
    secret=True,
)
_NAMES = _Kind(_names, "names of API keys with commas between them (prometheus,ops)")
_ORIGINS = _Kind(_origins, "origins with commas between them (https://app.example.com), or *")


_PRESETS = _Kind(_presets, "a path to a TOML file of presets, without spaces around it")


def _setting(default: Any, kind: _Kind, help: str, *, shown: str | None = None) -> Any:
    metadata = {"kind": kind, "help": help, "shown": str(default) if shown is None else shown}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Every setting with its default; see `describe` for what each one means."""

    model: str = _setting(
        "nvidia/music-flamingo-2601-hf", _TEXT, "Hub id or directory of the checkpoint"
    )
    revision: str | None = _setting(
        None, _TEXT, "Branch, tag or commit of the hub id", shown="the hub's main"
    )
    engine: Literal["auto", "vllm", "transformers"] = _setting(
        "auto",
        _choice("auto", "vllm", "transformers"),
        "The engine; auto takes vllm where it starts, else transformers",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto",
        _choice("auto", "float32", "bfloat16", "float16"),
        "Type of the weights; auto takes the checkpoint's",
    )
    max_model_len: int | None = _setting(
        None,
        _integer(1, 10_000_000),
        "Tokens of prompt, song and answer together",
        shown="the checkpoint's",
    )
    max_num_seqs: int = _setting(64, _integer(1, 65_536), "Prompts in the engine at once")
    engine_args: Mapping[str, Any] = _setting(
        {}, _ENGINE_ARGS, "JSON object of further vLLM engine arguments"
    )
    max_group_size: int = _setting(
        8, _integer(1, 65_536), "The largest group_size that a batch may ask for"
    )
    max_prompts: int = _setting(64, _integer(1, 65_536), "Prompts in one batch")
    max_new_tokens: int = _setting(
        2048, _integer(1, 10_000_000), "The largest max_new_tokens that a prompt may ask for"
    )
    presets: tuple[Preset, ...] | None = _setting(
        None, _PRESETS, "TOML file of the presets, in place of the built-in ones", shown="built in"
    )
    max_queued: int = _setting(256, _integer(1, 10_000_000), "Prompts that may wait; more get 503")
    max_body_bytes: int = _setting(
        64 * MIB, _size(64 * MIB), "Size of a JSON body or of part 'request'", shown="64MiB"
    )
    max_audio_bytes: int = _setting(
        256 * MIB, _size(64 * GIB), "Size of an uploaded or downloaded audio file", shown="256MiB"
    )
    max_audio_seconds: float = _setting(
        3600.0, _number(0.1, 86_400), "Length of a song; longer ones get 422", shown="3600"
    )
    body_timeout_seconds: float = _setting(
        30.0,
        _number(0.1, 86_400),
        "Time for a body to arrive, and a second more for each 16 KiB of it; 408 after it",
        shown="30",
    )
    max_bodies_bytes: int = _setting(
        2 * GIB, _size(1024 * GIB), "Size of all bodies together; more get 503", shown="2GiB"
    )
    max_songs_bytes: int = _setting(
        4 * GIB,
        _size(1024 * GIB),
        "Size of all decoded songs together (a minute has 3.7 MiB); more get 503",
        shown="4GiB",
    )
    request_timeout_seconds: float = _setting(
        600.0, _number(0.1, 86_400), "Time for a request; 504 after it", shown="600"
    )
    max_restarts: int = _setting(
        3, _integer(0, 1000), "Engine restarts in a row without an answer; then the server ends"
    )
    stall_seconds: float = _setting(
        120.0, _number(1, 86_400), "An engine that ends no step for so long is ended and restarted"
    )
    song_cache_bytes: int = _setting(
        256 * MIB,
        _size(64 * GIB, minimum_bytes=0),
        "Decoded songs that are kept for ten minutes; 0 keeps none",
        shown="256MiB",
    )
    decoder_workers: int = _setting(2, _integer(1, 256), "Songs that are decoded at once")
    allowed_audio_hosts: tuple[str, ...] = _setting(
        (), _HOSTS, "The only hosts that audio_url may name", shown="any public host"
    )
    allow_private_audio_urls: bool = _setting(
        False,
        _BOOLEAN,
        "For development: audio_url may reach loopback and private addresses",
        shown="false",
    )
    api_keys: Mapping[bytes, str] = _setting(
        {}, _API_KEYS, "name:key pairs (ann:KEY,bob:KEY) of who may ask", shown="everybody may ask"
    )
    metrics_keys: tuple[str, ...] = _setting(
        (),
        _NAMES,
        "Names of the keys that may read /metrics, which counts all keys' songs",
        shown="every key",
    )
    cache_scope: Literal["key", "all", "request"] = _setting(
        "key",
        _choice("key", "all", "request"),
        "Who finds a song in the caches: its key's requests, all (which then can tell by the time "
        "whether another key has sent it), or only the prompts of its own request",
    )
    key_max_prompts: int | None = _setting(
        None,
        _integer(1, 10_000_000),
        "Prompts that one key may have in flight; more get 429",
        shown="no limit",
    )
    key_max_seconds_per_day: float | None = _setting(
        None,
        _number(0, 10_000_000),
        "Engine seconds that one key may use in a day (UTC); then 429",
        shown="no limit",
    )
    allowed_origins: tuple[str, ...] = _setting(
        (), _ORIGINS, "Origins whose web pages may call the API (CORS)", shown="none"
    )
    gpu_usd_per_second: float | None = _setting(
        None,
        _number(0, 1000),
        "Price of a second of the engine's time, for cost_usd",
        shown=f"{FALLBACK_USD_PER_SECOND} (an A100 40 GB), said to be a fallback",
    )
    usage_db: str | None = _setting(
        "adapter-usage.sqlite3",
        _PATH_OR_NOTHING,
        "SQLite file of the usage log, on a local disk; empty turns the log off",
    )
    usage_retention_days: int | None = _setting(
        None,
        _integer(1, 36_500),
        "Records of the usage log that are older are deleted",
        shown="kept for ever",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info",
        _choice("debug", "info", "warning", "error"),
        "The least severe level that is logged",
    )
    log_format: Literal["text", "json"] = _setting(
        "text", _choice("text", "json"), "A line of the log as text or as a JSON object"
    )
    drain_seconds: float = _setting(
        120.0,
        _number(0, 86_400),
        "Time for the requests in flight to finish after SIGTERM",
        shown="120",
    )

    @property
    def rate_usd_per_second(self) -> float:
        """US dollars for a second of the engine's time."""
        if self.gpu_usd_per_second is None:
            return FALLBACK_USD_PER_SECOND
        return self.gpu_usd_per_second

    @property
    def rate_source(self) -> Literal["configured", "fallback"]:
        return "fallback" if self.gpu_usd_per_second is None else "configured"


def variable_name(setting_name: str) -> str:
    return PREFIX + setting_name.upper()


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read every `ADAPTER_*` variable. Raises SettingsError (one line) at the first bad one."""
    declared = {variable_name(setting.name): setting for setting in fields(Settings)}
    given = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    given.pop(CLIENT_KEY, None)
    _refuse_unknown(given, declared)
    return Settings(**{declared[name].name: _parse(declared[name], given[name]) for name in given})


def load_client_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The API key that a client sends, not on its command line, which all users of a machine can
    read. Raises SettingsError for what can be no key."""
    key = environ.get(CLIENT_KEY)
    if key is not None and not _KEY.fullmatch(key):
        raise SettingsError(
            f"{CLIENT_KEY}=(hidden): expected an API key of visible ASCII without commas"
        )
    return key


def describe() -> list[tuple[str, str, str]]:
    """(variable, default as text, help) of every setting, in the order of declaration."""
    return [
        (variable_name(setting.name), setting.metadata["shown"], setting.metadata["help"])
        for setting in fields(Settings)
    ]


def _refuse_unknown(given: Mapping[str, str], declared: Mapping[str, Any]) -> None:
    for name in sorted(given.keys() - declared.keys()):
        bare_names = [known.removeprefix(PREFIX) for known in declared]
        close = difflib.get_close_matches(name.removeprefix(PREFIX), bare_names, n=1)
        hint = f"did you mean {PREFIX}{close[0]}?" if close else "unset it"
        # Its value stays unsaid: a misspelt ADAPTER_API_KEYS holds keys.
        raise SettingsError(f"{name} is no setting: {_ELSEWHERE.get(name, hint)}")


def _parse(setting: Field[Any], text: str) -> Any:
    kind: _Kind = setting.metadata["kind"]
    try:
        return kind.parse(text)
    except (ValueError, KeyError, RecursionError) as error:
        expected = str(error) if isinstance(error, _ExpectedError) else kind.expected
        shown = "(hidden)" if kind.secret else _shorten(text)
        name = variable_name(setting.name)
        raise SettingsError(f"{name}={shown}: expected {expected}") from None


def _shorten(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
