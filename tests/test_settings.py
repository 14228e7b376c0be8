"""Settings: what the environment may say, and what stops the start."""

import dataclasses
import hashlib
import math

import pytest

from adapter.errors import SettingsError
from adapter.settings import (
    RESERVED_ENGINE_ARGS,
    Settings,
    describe,
    load_client_key,
    load_settings,
)


def refusal(**environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings({f"ADAPTER_{name.upper()}": text for name, text in environ.items()})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = load_settings({"PATH": "/bin", "HF_TOKEN": "x"})
    assert settings == Settings()
    assert settings.model == "nvidia/music-flamingo-2601-hf"
    assert (settings.engine, settings.dtype, settings.max_model_len) == ("auto", "auto", None)
    assert (settings.max_num_seqs, settings.max_queued, settings.max_prompts) == (64, 256, 64)
    assert (settings.max_group_size, settings.max_new_tokens) == (8, 2048)
    assert (settings.max_audio_bytes, settings.max_body_bytes) == (256 * 2**20, 64 * 2**20)
    assert (settings.max_audio_seconds, settings.request_timeout_seconds) == (3600, 600)
    assert settings.allow_private_audio_urls is False
    assert settings.usage_db == "adapter-usage.sqlite3"
    assert settings.usage_retention_days is None


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("model", "./demo-checkpoint", "./demo-checkpoint"),
        ("revision", "v1.0", "v1.0"),
        ("engine", "vLLM", "vllm"),
        ("dtype", "float32", "float32"),
        ("max_model_len", "8192", 8192),
        ("max_num_seqs", "1", 1),
        ("engine_args", '{"quantization": "fp8", "seed": 1}', {"quantization": "fp8", "seed": 1}),
        ("max_audio_bytes", "1048576", 2**20),
        ("max_audio_bytes", "1GiB", 2**30),
        ("max_audio_bytes", "300 KiB", 300 * 1024),
        ("max_audio_seconds", "90.5", 90.5),
        ("request_timeout_seconds", "1e3", 1000.0),
        ("allowed_audio_hosts", "a.example.com, B.example.com", ("a.example.com", "b.example.com")),
        ("allowed_audio_hosts", "*.example.com, b.net:8080", ("*.example.com", "b.net:8080")),
        ("allow_private_audio_urls", "true", True),
        ("gpu_usd_per_second", "5.83e-4", 0.000583),
        ("gpu_usd_per_second", "0", 0.0),
        ("usage_retention_days", "400", 400),
        ("usage_db", "/var/lib/usage log.sqlite3", "/var/lib/usage log.sqlite3"),
        ("usage_db", "", None),
        ("log_level", "WARNING", "warning"),
    ],
)
def test_a_good_value_is_read_with_its_type(name: str, text: str, value: object) -> None:
    settings = load_settings({f"ADAPTER_{name.upper()}": text})
    assert getattr(settings, name) == value
    assert type(getattr(settings, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model", ""),
        ("model", " spaced "),
        ("model", "two\nlines"),
        ("engine", "tgi"),
        ("dtype", "int8"),
        ("max_model_len", "0"),
        ("max_num_seqs", "64.0"),
        ("max_num_seqs", "-1"),
        ("max_num_seqs", "1_000"),
        ("max_num_seqs", "٣"),
        ("max_num_seqs", "9" * 5000),
        ("max_prompts", "many"),
        ("engine_args", "tensor_parallel_size=2"),
        ("engine_args", "[1]"),
        ("engine_args", '{"a": NaN}'),
        ("engine_args", '{"a": ' + "[" * 100_000),
        ("max_audio_bytes", "256MB"),
        ("max_audio_bytes", "0"),
        ("max_body_bytes", "65MiB"),
        ("max_audio_seconds", "inf"),
        ("max_audio_seconds", "nan"),
        ("max_audio_seconds", "1e400"),
        ("request_timeout_seconds", "0"),
        ("request_timeout_seconds", "-5"),
        ("gpu_usd_per_second", "-1"),
        ("gpu_usd_per_second", "0,000583"),
        ("allowed_audio_hosts", ""),
        ("allowed_audio_hosts", "https://a.example.com"),
        ("allowed_audio_hosts", "*"),
        ("allowed_audio_hosts", "a.example.com:http"),
        ("allowed_audio_hosts", "a.example.com,,b.example.com"),
        ("allow_private_audio_urls", "maybe"),
        ("decoder_workers", "0"),
        ("usage_db", " usage.sqlite3"),
        ("usage_db", "usage\n.sqlite3"),
        ("usage_retention_days", "0"),
        ("usage_retention_days", ""),
        ("log_level", "loud"),
    ],
)
def test_a_bad_value_is_one_line_with_variable_value_and_expectation(name: str, text: str) -> None:
    message = refusal(**{name: text})
    assert message.startswith(f"ADAPTER_{name.upper()}=")
    assert repr(text)[1:20].rstrip("'") in message
    assert ": expected " in message
    assert len(message) < 300


def test_a_bad_number_is_told_its_range() -> None:
    assert refusal(max_num_seqs="0") == (
        "ADAPTER_MAX_NUM_SEQS='0': expected an integer from 1 to 65536"
    )


def test_a_client_s_key_is_no_setting_of_a_server_and_does_it_no_harm() -> None:
    environ = {"ADAPTER_CLIENT_KEY": "hunter2"}
    assert load_settings(environ) == Settings()
    assert (load_client_key(environ), load_client_key({})) == ("hunter2", None)


@pytest.mark.parametrize("key", ["", "two words", "a,b", "schlüssel", "new\nline"])
def test_what_can_be_no_client_s_key_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_client_key({"ADAPTER_CLIENT_KEY": key})
    expected = "expected an API key of visible ASCII without commas"
    assert str(caught.value) == f"ADAPTER_CLIENT_KEY=(hidden): {expected}"


def test_an_unknown_variable_stops_the_start_with_the_likely_one() -> None:
    message = refusal(max_prompt="3")
    assert message == "ADAPTER_MAX_PROMPT is no setting: did you mean ADAPTER_MAX_PROMPTS?"
    assert "unset it" in refusal(zzz="3")


def test_a_misspelt_key_variable_does_not_show_its_keys() -> None:
    assert "hunter2" not in refusal(api_key="team:hunter2")


def test_host_and_port_are_pointed_to_the_command_line() -> None:
    assert "--port" in refusal(port="tcp://10.0.0.1:8000")
    assert "--host" in refusal(host="0.0.0.0")


def test_keys_are_kept_as_digests_with_their_names() -> None:
    settings = load_settings({"ADAPTER_API_KEYS": "ann:hunter2, bob:a:b=/+-_, ann:hunter3"})
    assert sorted(settings.api_keys.values()) == ["ann", "ann", "bob"]
    assert settings.api_keys[hashlib.sha256(b"a:b=/+-_").digest()] == "bob"
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    "keys",
    [
        "",  # a variable that was meant to hold keys must not open the server
        "hunter2",
        ":hunter2",
        "ann:",
        "ann:hunter2,",
        "ann smith:hunter2",
        "ann:hunter2 hunter2",
        "ann:h\u00fcnter2",
        "ann:hunter2,bob:hunter2",
    ],
)
def test_bad_keys_stop_the_start_without_being_shown(keys: str) -> None:
    message = refusal(api_keys=keys)
    assert "ADAPTER_API_KEYS=(hidden): expected " in message
    assert "hunter2" not in message


@pytest.mark.parametrize("origin", ["app.example.com", "https://a.example.com/path", "", "null"])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    assert "ADAPTER_ALLOWED_ORIGINS" in refusal(allowed_origins=origin)


@pytest.mark.parametrize("key", RESERVED_ENGINE_ARGS)
def test_an_engine_arg_that_the_adapter_sets_stops_the_start(key: str) -> None:
    message = refusal(engine_args=f'{{"gpu_memory_utilization": 0.5, "{key}": 1}}')
    assert repr(key) in message
    assert RESERVED_ENGINE_ARGS[key] in message


@pytest.mark.parametrize("key", RESERVED_ENGINE_ARGS)
def test_a_reserved_engine_arg_is_one_that_vllm_has(key: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert key in {option.name for option in dataclasses.fields(AsyncEngineArgs)}


def test_the_rate_says_where_it_comes_from() -> None:
    fallback, configured = Settings(), load_settings({"ADAPTER_GPU_USD_PER_SECOND": "0.002"})
    assert (fallback.rate_usd_per_second, fallback.rate_source) == (0.000583, "fallback")
    assert (configured.rate_usd_per_second, configured.rate_source) == (0.002, "configured")


def test_describe_lists_every_setting_once_with_default_and_help() -> None:
    described = describe()
    names = [name for name, _, _ in described]
    assert names == [f"ADAPTER_{setting.name.upper()}" for setting in dataclasses.fields(Settings)]
    assert all(shown and help and "\n" not in help for _, shown, help in described)
    assert ("ADAPTER_MAX_PROMPTS", "64", "Prompts in one batch") in described


@pytest.mark.parametrize(
    "name", ["max_body_bytes", "max_audio_bytes", "max_audio_seconds", "request_timeout_seconds"]
)
def test_a_shown_default_is_the_default(name: str) -> None:
    shown = {variable: default for variable, default, _ in describe()}
    variable = f"ADAPTER_{name.upper()}"
    assert load_settings({variable: shown[variable]}) == Settings()


def test_settings_are_frozen_and_do_not_share_their_engine_args() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().model = "other"  # type: ignore[misc]
    assert Settings().engine_args is not Settings().engine_args
    assert math.isfinite(Settings().rate_usd_per_second)
