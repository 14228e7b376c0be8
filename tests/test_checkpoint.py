"""A checkpoint's limits come from its files, and its arithmetic is the processor's."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import httpx2
import huggingface_hub
import numpy as np
import pytest
import transformers
from huggingface_hub import errors
from hypothesis import given
from hypothesis import strategies as st

from adapter.checkpoint import Checkpoint, load_checkpoint
from adapter.errors import SettingsError
from adapter.random_model import TINY, write_random_model

RATE = 16_000
WINDOW = 30 * RATE


@pytest.fixture(scope="module")
def checkpoint(random_model: Path) -> Checkpoint:
    return load_checkpoint(str(random_model))


@pytest.fixture(scope="module")
def processor(random_model: Path) -> Any:
    return transformers.AutoProcessor.from_pretrained(random_model)


@pytest.fixture
def copy(random_model: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own to spoil."""
    return Path(shutil.copytree(random_model, tmp_path / "copy"))


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_limits_and_ids_are_the_checkpoints(checkpoint: Checkpoint, processor: Any) -> None:
    tokenizer = processor.tokenizer

    assert checkpoint.name == "demo-model"
    assert checkpoint.architecture == "MusicFlamingoForConditionalGeneration"
    assert checkpoint.context_tokens == 32_768  # not the 1200 of RoTE
    assert (checkpoint.max_audio_seconds, checkpoint.window_seconds) == (1200, 30)
    assert tokenizer.convert_ids_to_tokens(checkpoint.audio_token_id) == "<sound>"
    assert checkpoint.audio_bos_token_id == processor.audio_bos_token_id
    assert checkpoint.audio_eos_token_id == processor.audio_eos_token_id
    assert tokenizer.convert_ids_to_tokens(checkpoint.eos_token_ids) == [
        "<|im_end|>",
        "<|endoftext|>",
    ]
    assert tokenizer.convert_ids_to_tokens(checkpoint.pad_token_id) == "<|endoftext|>"


def test_the_rest_of_the_family_has_limits_of_its_own(tmp_path: Path) -> None:
    shape = dataclasses.replace(
        TINY, architecture="AudioFlamingo3ForConditionalGeneration", max_audio_seconds=600
    )
    write_random_model(tmp_path / "af3", shape=shape)
    write_random_model(
        tmp_path / "next",
        shape=dataclasses.replace(TINY, max_audio_seconds=1800, context_tokens=131_072),
    )

    flamingo_3 = load_checkpoint(str(tmp_path / "af3"))
    flamingo_next = load_checkpoint(str(tmp_path / "next"))

    assert flamingo_3.max_clip_seconds() == 600
    assert flamingo_3.audio_bos_token_id is None
    assert flamingo_3.widen((1, flamingo_3.audio_token_id, 2), 2) == [
        1,
        flamingo_3.audio_token_id,
        flamingo_3.audio_token_id,
        2,
    ]
    assert flamingo_next.max_clip_seconds() == 1800
    assert flamingo_next.context_tokens == 131_072


@pytest.mark.parametrize("seconds", [0.1, 1, 12.3, 29.99, 30, 30.021, 31, 59.9, 60.03, 95])
def test_a_clip_has_as_many_audio_tokens_as_the_processor_makes(
    checkpoint: Checkpoint, processor: Any, seconds: float
) -> None:
    samples = np.zeros(round(seconds * RATE), dtype=np.float32)

    token_ids = processor(text="<sound>", audio=samples)["input_ids"][0].tolist()

    num_audio_tokens = checkpoint.num_audio_tokens(len(samples))
    assert num_audio_tokens == token_ids.count(checkpoint.audio_token_id)
    assert checkpoint.widen((checkpoint.audio_token_id,), num_audio_tokens) == token_ids


@given(st.integers(1, 1300 * RATE))
def test_audio_tokens_are_counted_by_the_processors_formula(
    checkpoint: Checkpoint, processor: Any, num_samples: int
) -> None:
    frames = len(range(0, min(num_samples, 1200 * RATE), processor.feature_extractor.hop_length))

    expected = processor._get_audio_token_length(frames)

    assert checkpoint.num_audio_tokens(num_samples) == max(0, expected)


@pytest.mark.parametrize("windows", [1, 2, 39])
@pytest.mark.parametrize(("tail", "heard"), [(0, 0), (1, 0), (320, 0), (321, 321), (RATE, RATE)])
def test_a_tail_without_embeddings_behind_whole_windows_is_dropped(
    checkpoint: Checkpoint, windows: int, tail: int, heard: int
) -> None:
    assert checkpoint.audible_samples(windows * WINDOW + tail) == windows * WINDOW + heard


def test_a_clip_shorter_than_one_audio_token_is_left_alone(checkpoint: Checkpoint) -> None:
    assert checkpoint.audible_samples(320) == 320
    assert checkpoint.num_audio_tokens(320) == 0
    assert checkpoint.num_audio_tokens(321) == 1
    assert checkpoint.num_audio_tokens(0) == 0


def test_no_more_is_audible_than_the_checkpoint_hears(checkpoint: Checkpoint) -> None:
    assert checkpoint.audible_samples(1200 * RATE + 5000) == 1200 * RATE
    assert checkpoint.num_audio_tokens(4000 * RATE) == 40 * 750


def test_a_short_context_shortens_the_longest_clip(random_model: Path) -> None:
    checkpoint = load_checkpoint(str(random_model), max_model_len=2560 + 2 + 1000)

    assert checkpoint.context_tokens == 3562
    assert checkpoint.max_clip_seconds() == 40
    assert checkpoint.num_audio_tokens(40 * RATE) == 1000
    assert checkpoint.max_clip_seconds(text_tokens=3560) == 0


@pytest.mark.parametrize(
    ("max_model_len", "expected"),
    [(32_769, "at most 32768"), (2570, "room for audio beside 2560 tokens")],
)
def test_a_context_that_cannot_be_kept_stops_the_start(
    random_model: Path, max_model_len: int, expected: str
) -> None:
    with pytest.raises(SettingsError, match=f"ADAPTER_MAX_MODEL_LEN={max_model_len}.*{expected}"):
        load_checkpoint(str(random_model), max_model_len=max_model_len)


def test_the_name_is_the_directorys_last(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(random_model)

    assert load_checkpoint(".").name == "demo-model"


def test_end_of_turn_ids_are_found_without_a_generation_config(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    without = load_checkpoint(str(copy))
    edit(copy / "config.json", text_config={"model_type": "qwen2", "eos_token_id": [7, 8]})
    listed = load_checkpoint(str(copy))

    assert without.eos_token_ids == (576,)
    assert listed.eos_token_ids == (7, 8, 576)


def test_a_directory_without_a_checkpoint_stops_the_start(tmp_path: Path) -> None:
    for model in (str(tmp_path), str(tmp_path / "nothing"), "./nothing", "~/nothing"):
        with pytest.raises(SettingsError, match=r"no config\.json") as raised:
            load_checkpoint(model)
        assert f"ADAPTER_MODEL={model}" in str(raised.value)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("config.json", "{", "names no architecture"),
        ("config.json", "{}", "names no architecture"),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', "is a LlamaForCausalLM"),
        ("tokenizer.json", "{", "cannot be loaded"),
        ("processor_config.json", "{", "cannot be loaded"),
        ("tokenizer.json", None, "expected files of one checkpoint, tokenizer.json among them"),
    ],
)
def test_a_spoilt_checkpoint_stops_the_start_with_one_line(
    copy: Path, file: str, content: str | None, expected: str
) -> None:
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_text(content)

    with pytest.raises(SettingsError, match=expected) as raised:
        load_checkpoint(str(copy))

    assert str(raised.value).startswith(f"ADAPTER_MODEL={copy}")
    assert "\n" not in str(raised.value)


def test_a_tokenizer_without_the_audio_token_stops_the_start(copy: Path) -> None:
    edit(copy / "processor_config.json", audio_token="<music>")

    with pytest.raises(SettingsError, match="no token '<music>'"):
        load_checkpoint(str(copy))


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    return kind("first line\nsecond line", response=httpx.Response(status, request=HUB))


HUB = httpx.Request("GET", "https://hub.example/config.json")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (http_error(errors.GatedRepoError, 403), "accept its licence.*HF_TOKEN"),
        (http_error(errors.RepositoryNotFoundError, 401), "check the name.*HF_TOKEN"),
        (http_error(errors.RevisionNotFoundError, 404), "ADAPTER_REVISION"),
        (http_error(errors.RemoteEntryNotFoundError, 404), r"no config\.json"),
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (http_error(errors.HfHubHTTPError, 500), "download failed.*first line$"),
        (httpx.ReadTimeout("too slow"), "download failed.*too slow"),
        (httpx2.ReadTimeout("too slow"), "download failed.*too slow"),
        (OSError(28, "No space left on device"), "download failed.*No space left"),
    ],
)
def test_a_model_that_the_hub_does_not_give_stops_the_start_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)

    with pytest.raises(SettingsError, match=expected) as raised:
        load_checkpoint("nvidia/music-flamingo-2601-hf")

    assert str(raised.value).startswith("ADAPTER_MODEL=nvidia/music-flamingo-2601-hf: ")
    assert "\n" not in str(raised.value)


def test_a_name_that_is_no_hub_id_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="expected a directory or a hub id"):
        load_checkpoint("no such/model/at all")


def test_a_hub_model_is_read_from_its_download(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def give(model: str, file: str = "", *, revision: str | None, **_: Any) -> str:
        asked.append((model, revision))
        return str(random_model / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", give)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)

    checkpoint = load_checkpoint("someone/flamingo", "v2")

    assert (checkpoint.name, checkpoint.path) == ("someone/flamingo", str(random_model))
    assert asked == [("someone/flamingo", "v2")] * 2


def test_a_hub_model_of_another_architecture_is_refused_before_its_weights_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["WhisperForAudioClassification"]}')
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "config.json")
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail())

    with pytest.raises(SettingsError, match="it is a WhisperForAudioClassification"):
        load_checkpoint("someone/whisper")
