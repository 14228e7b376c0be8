"""What the adapter must know of a checkpoint, read from its own files, never from constants."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.errors import SettingsError

logger = logging.getLogger(__name__)

ARCHITECTURES = ("MusicFlamingoForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration")
TEXT_TOKENS = 2560  # of the context, kept free of audio: prompt, system prompt and answer
# What a checkpoint consists of; uploads may hold copies in other formats.
FILES = ["*.json", "*.jinja", "*.txt", "*.safetensors"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's limits and token ids. `path` is its directory, also for a hub model."""

    name: str
    path: str
    revision: str | None
    architecture: str
    dtype: str  # "float32", "bfloat16" or "float16"; "auto" where its config.json names none
    context_tokens: int
    max_audio_seconds: float
    window_seconds: float
    sampling_rate: int
    hop_length: int  # samples between two mel frames
    audio_token_id: int
    audio_bos_token_id: int | None
    audio_eos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int = 0  # logits of the model, which may be more than the tokenizer has tokens

    def num_audio_tokens(self, num_samples: int) -> int:
        """How many embeddings the audible part of a clip gives; 0 where it is too short.

        A window of f mel frames gives ((f - 1) // 2 + 1) // 2: a convolution of stride 2, then a
        mean over pairs (`_get_audio_token_length` of transformers' processors).
        """
        whole, tail = divmod(self.audible_samples(num_samples), self._window_samples)
        return whole * self._num_embeddings(self._window_samples) + self._num_embeddings(tail)

    def audible_samples(self, num_samples: int) -> int:
        """The leading samples of a clip that are heard: no more than the checkpoint takes, and no
        tail behind whole windows that gives no embedding.

        transformers (5.19) counts no window for the time embeddings of such a tail, at most 320
        samples: an IndexError alone, another song's wrong time embeddings in a batch.
        """
        max_windows = int(self.max_audio_seconds // self.window_seconds)
        num_samples = min(num_samples, max_windows * self._window_samples)
        whole, tail = divmod(num_samples, self._window_samples)
        if whole and not self._num_embeddings(tail):
            return whole * self._window_samples
        return num_samples

    def max_clip_seconds(self, text_tokens: int = TEXT_TOKENS) -> float:
        """The longest clip: what the checkpoint hears or, if less, what the context holds beside
        `text_tokens`; 0.0 where it holds none."""
        windows = self.max_audio_seconds // self.window_seconds
        return min(windows * self.window_seconds, self._context_seconds(text_tokens))

    def widen(self, prompt_token_ids: tuple[int, ...], num_audio_tokens: int) -> list[int]:
        """Put `num_audio_tokens` placeholders, and the boundary tokens of the checkpoints that have
        them, where the prompt has its one placeholder; a prompt without one stays as it is."""
        if self.audio_token_id not in prompt_token_ids:
            return list(prompt_token_ids)
        at = prompt_token_ids.index(self.audio_token_id)
        audio = [self.audio_token_id] * num_audio_tokens
        if self.audio_bos_token_id is not None and self.audio_eos_token_id is not None:
            audio = [self.audio_bos_token_id, *audio, self.audio_eos_token_id]
        return [*prompt_token_ids[:at], *audio, *prompt_token_ids[at + 1 :]]

    @property
    def num_boundary_tokens(self) -> int:
        return 0 if self.audio_bos_token_id is None else 2

    @property
    def _window_samples(self) -> int:
        return int(self.window_seconds * self.sampling_rate)

    def _num_embeddings(self, num_samples: int) -> int:
        frames = -(-num_samples // self.hop_length)
        return ((frames - 1) // 2 + 1) // 2

    def _context_seconds(self, text_tokens: int) -> float:
        audio_tokens = self.context_tokens - text_tokens - self.num_boundary_tokens
        tokens_a_window = self._num_embeddings(self._window_samples)
        return max(0, audio_tokens) * self.window_seconds / tokens_a_window


def load_checkpoint(
    model: str, revision: str | None = None, *, max_model_len: int | None = None
) -> Checkpoint:
    """Read a checkpoint from a directory, or from the hub: then its files are downloaded first.

    Raises SettingsError, with a line that says what to do, for a model that cannot be had or read,
    one of another architecture, and a `max_model_len` that it cannot keep.
    """
    from transformers import AutoConfig, AutoProcessor

    path = find_directory(model, revision)
    architecture = check_architecture(model, path / "config.json")
    try:
        config = AutoConfig.from_pretrained(path)
        processor = AutoProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SettingsError(
            f"ADAPTER_MODEL={model}: expected a whole checkpoint, but its processor or tokenizer "
            f"cannot be loaded: {_one_line(error)}"
        ) from error
    eos_token_ids = _eos_token_ids(path, config, processor.tokenizer)
    pad_token_id = processor.tokenizer.pad_token_id
    checkpoint = Checkpoint(
        name=path.resolve().name if _is_local(model) else model,
        path=str(path),
        revision=revision,
        architecture=architecture,
        dtype=str(config.dtype).removeprefix("torch.") if config.dtype else "auto",
        context_tokens=_context_tokens(config, max_model_len),
        max_audio_seconds=processor.max_audio_len,
        window_seconds=processor.feature_extractor.chunk_length,
        sampling_rate=processor.feature_extractor.sampling_rate,
        hop_length=processor.feature_extractor.hop_length,
        audio_token_id=_token_id(processor, "audio_token", model),
        audio_bos_token_id=_boundary_token_id(processor, "audio_bos_token", model),
        audio_eos_token_id=_boundary_token_id(processor, "audio_eos_token", model),
        eos_token_ids=eos_token_ids,
        pad_token_id=eos_token_ids[-1] if pad_token_id is None else pad_token_id,
        vocab_size=int(config.text_config.vocab_size),
    )
    _check_agrees(checkpoint, config, model)
    _check_hears(checkpoint)
    return checkpoint


def find_directory(model: str, revision: str | None) -> Path:
    """The checkpoint's directory: `model` itself, or where its download from the hub lies.

    Raises SettingsError.
    """
    path = Path(model).expanduser()
    if not _is_local(model):
        return download(model, revision)
    if not (path / "config.json").is_file():
        raise SettingsError(
            f"ADAPTER_MODEL={model}: expected a checkpoint's directory, but it has no config.json; "
            "`python -m adapter demo-model DIR` makes a demo"
        )
    return path


def _is_local(model: str) -> bool:
    """Whether `model` names a directory: one that is there, or a path that no hub id looks like."""
    return model.startswith((".", "/", "~")) or Path(model).is_dir()


def download(model: str, revision: str | None) -> Path:
    """Download what of a hub model is not in the cache yet, its configuration first: a model of
    another architecture is refused before gigabytes come. Raises SettingsError."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    at = f"{model} (revision {revision})" if revision else model
    failures: tuple[type[Exception], ...] = (OSError, HFValidationError, *_transport_errors())
    try:
        logger.info("looking up %s on the Hugging Face hub", at)
        config = huggingface_hub.hf_hub_download(model, "config.json", revision=revision)
        check_architecture(model, Path(config))
        logger.info("downloading %s; files that are in the cache are kept", at)
        path = huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=FILES)
    except failures as error:
        raise SettingsError(f"ADAPTER_MODEL={model}: {_why_no_download(error)}") from error
    logger.info("%s is complete in %s", at, path)
    return Path(path)


def _transport_errors() -> list[type[Exception]]:
    """What a broken connection raises: huggingface_hub speaks through httpx, since 2.0 httpx2."""
    loaded = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    return [module.HTTPError for module in loaded if module is not None]


def _why_no_download(error: Exception) -> str:
    """What to do about it. The hub answers for a private model as for one that does not exist."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            "the model is gated: accept its licence on its page on the hub, then set HF_TOKEN to a "
            "token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such revision: check ADAPTER_REVISION"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "neither a directory here nor a model on the hub: check the name and, if the model is "
            "private, set HF_TOKEN"
        )
    if isinstance(error, errors.HFValidationError):
        return "expected a directory or a hub id such as nvidia/music-flamingo-2601-hf"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return "the model on the hub has no config.json: expected a transformers checkpoint"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "not a directory here, not in the cache, and the hub cannot be reached: check the "
            "name, the network and HF_HUB_OFFLINE"
        )
    return f"the download failed; start again to go on with it: {_one_line(error)}"


def check_architecture(model: str, config_path: Path) -> str:
    """The architecture that config.json names. Raises SettingsError unless it is served here."""
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        architecture = str(config["architectures"][0])
    except (ValueError, TypeError, LookupError) as error:
        raise SettingsError(
            f"ADAPTER_MODEL={model}: its config.json names no architecture ({_one_line(error)}); "
            f"expected {' or '.join(ARCHITECTURES)}"
        ) from error
    if architecture not in ARCHITECTURES:
        raise SettingsError(
            f"ADAPTER_MODEL={model}: it is a {architecture}; expected {' or '.join(ARCHITECTURES)}"
        )
    return architecture


def _context_tokens(config: Any, max_model_len: int | None) -> int:
    """The text model's context; the configuration's own `max_position_embeddings` is RoTE's."""
    context_tokens = int(config.text_config.max_position_embeddings)
    if max_model_len is None:
        return context_tokens
    if max_model_len > context_tokens:
        raise SettingsError(
            f"ADAPTER_MAX_MODEL_LEN={max_model_len}: expected at most {context_tokens}, the "
            "checkpoint's context"
        )
    return max_model_len


def _check_agrees(checkpoint: Checkpoint, config: Any, model: str) -> None:
    """transformers makes a tokenizer up where its file is missing; its ids are others."""
    if checkpoint.audio_token_id == config.audio_token_id:
        return
    raise SettingsError(
        f"ADAPTER_MODEL={model}: the audio token is {checkpoint.audio_token_id} in its tokenizer "
        f"and {config.audio_token_id} in its config.json; expected files of one checkpoint, "
        "tokenizer.json among them"
    )


def _check_hears(checkpoint: Checkpoint) -> None:
    if checkpoint.max_clip_seconds() >= 1:
        return
    raise SettingsError(
        f"ADAPTER_MAX_MODEL_LEN={checkpoint.context_tokens}: expected room for audio beside "
        f"{TEXT_TOKENS} tokens of text; 25 tokens hold a second"
    )


def _token_id(processor: Any, attribute: str, model: str) -> int:
    token = getattr(processor, attribute)
    token_id = processor.tokenizer.get_vocab().get(token)
    if token_id is None:
        raise SettingsError(f"ADAPTER_MODEL={model}: its tokenizer has no token {token!r}")
    return int(token_id)


def _boundary_token_id(processor: Any, attribute: str, model: str) -> int | None:
    """None for Audio Flamingo 3, whose processor puts nothing around the audio."""
    return _token_id(processor, attribute, model) if hasattr(processor, attribute) else None


def _eos_token_ids(path: Path, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """All that end an answer: generation_config.json's, else the configuration's, and the
    tokenizer's."""
    generation = path / "generation_config.json"
    declared = None
    if generation.is_file():
        declared = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
    if declared is None:
        declared = getattr(config.text_config, "eos_token_id", None)
    token_ids = declared if isinstance(declared, list) else [declared]
    known = [int(i) for i in [*token_ids, tokenizer.eos_token_id] if i is not None]
    if not known:
        raise SettingsError(f"ADAPTER_MODEL={path.name}: no end-of-turn token is declared")
    return tuple(dict.fromkeys(known))


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
