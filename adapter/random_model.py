"""Random checkpoints: Music Flamingo directories of the real architecture, tiny, made on the spot.

Its weights are random, so its answers mean nothing; they look like text because each token's
embedding points at the tokens that follow it in `CORPUS`, and they differ with the song and the
prompt because the random layers in between choose among those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Tokenizer

Architecture = Literal[
    "MusicFlamingoForConditionalGeneration", "AudioFlamingo3ForConditionalGeneration"
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes and limits of a checkpoint; a head is `hidden_size / num_heads` wide.

    vLLM's attention on the CPU takes heads of 32, 64, 80, 96, 112, 128, … only.
    """

    encoder_layers: int = 2
    encoder_hidden_size: int = 64
    encoder_heads: int = 2
    num_layers: int = 2
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 256
    architecture: Architecture = "MusicFlamingoForConditionalGeneration"
    max_audio_seconds: int = 1200
    context_tokens: int = 32_768
    rope_theta: float = 1e6
    think: bool = False  # writes <think>…</think> before its answer


TINY = ModelShape()  # 0.7 M parameters: for tests
SMALL = ModelShape(  # 37 M parameters: for benchmarks, where arithmetic should outweigh overhead
    encoder_layers=4,
    encoder_hidden_size=384,
    encoder_heads=6,
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    intermediate_size=1792,
)

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
AUDIO_TOKENS = ("<sound>", "<|sound_bos|>", "<|sound_eos|>")
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN, *AUDIO_TOKENS)
THINK_TOKENS = ("<think>", "</think>")
NUM_MERGES = 320

# ChatML; the audio stands before all text of its turn, so that every prompt about one song has the
# same prefix.
CHAT_TEMPLATE = """\
{%- if not messages or messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content if part.type == 'audio' -%}{{- '<sound>' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

CORPUS = """\
The song opens with a soft piano and a slow beat. A warm bass enters in the second bar.
This track is a bright dance tune in a major key, played at a fast tempo with a steady drum.
The singer has a clear voice and holds the long notes at the end of each line.
In the chorus the guitar plays a loud riff over the drums, and the strings rise behind it.
The mood is calm and a little sad; the harmony moves from the minor chord to its relative major.
After the bridge the beat returns with more energy, and the horns answer the melody.
The genre is a mix of jazz and soul, with a hint of funk in the rhythm section.
The verse is quiet. The chorus is loud. The outro fades with a single held chord.
A gentle flute carries the theme while the harp adds small runs between the phrases.
The mix is wide and clean: the vocals sit in the centre, the keys on the left, the guitar right.
The tempo is about ninety beats per minute, in four, with a light swing on the snare.
The lyrics tell of a long road home, of rain on the window and a light in the distance.
There is no voice in this piece. The piano and the cello share the melody from start to end.
The key is close to D minor, and the bass walks down in steps before each new verse.
It would suit a film scene at night, or a slow drive through the city after the rain.
The drums are dry and close, the reverb on the voice is long, and the synth pad fills the rest.
"""


def write_random_model(directory: Path, *, seed: int = 0, shape: ModelShape = TINY) -> None:
    """Write a checkpoint that transformers, AutoProcessor and vLLM load: float32, no download.

    The same seed and shape give the same bytes. Raises FileExistsError where `directory` holds
    anything already.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(
            f"{directory} is not an empty directory: name a new one for the demo checkpoint"
        )
    tokenizer = build_tokenizer(think=shape.think)
    model = build_model(tokenizer, seed=seed, shape=shape)
    model.save_pretrained(directory)
    build_processor(tokenizer, shape).save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors' own are for their owner alone


def build_tokenizer(*, think: bool = False) -> Qwen2Tokenizer:
    """Train a byte-level BPE on `CORPUS`: 256 bytes, `NUM_MERGES` merges, the special tokens, and
    the tags of a think checkpoint, which are no special ones."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    backend = Qwen2Tokenizer().backend_tokenizer  # Qwen's normalizer and pre-tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=256 + NUM_MERGES,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Two newlines make a token, as in Qwen's: merges cross the border of "user\n" and a prompt.
    backend.train_from_iterator([*CORPUS.splitlines(), *["\n\n"] * 9], trainer)
    trained = json.loads(backend.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],  # type: ignore[misc]
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS),
    )
    if think:
        tokenizer.add_tokens(list(THINK_TOKENS))
    return tokenizer


def build_processor(tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> Any:
    """The family's processor: 30-second windows of 128 mel bins, cut at `max_audio_seconds`."""
    import transformers

    processor_class = shape.architecture.replace("ForConditionalGeneration", "Processor")
    feature_extractor = transformers.WhisperFeatureExtractor(  # type: ignore[no-untyped-call]
        feature_size=128, return_attention_mask=True
    )
    return getattr(transformers, processor_class)(
        feature_extractor=feature_extractor,
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        max_audio_len=shape.max_audio_seconds,
    )


def build_model(tokenizer: Qwen2Tokenizer, *, seed: int, shape: ModelShape) -> PreTrainedModel:
    """The model in float32 with weights drawn from `seed`, and the family's sampling defaults."""
    import torch
    import transformers

    config = build_config(tokenizer, shape)
    with torch.device("meta"):
        model: PreTrainedModel = getattr(transformers, shape.architecture)(config)
    weights = draw_weights(model, torch.Generator().manual_seed(seed))
    embeddings = weights["model.language_model.embed_tokens.weight"]
    weights["lm_head.weight"] = successor_weights(tokenizer, embeddings)
    model.load_state_dict(weights, assign=True)
    model.generation_config = build_generation_config(tokenizer)
    return model


def build_generation_config(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The family's sampling defaults."""
    from transformers import GenerationConfig

    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        repetition_penalty=1.05,
        eos_token_id=tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> Any:
    from transformers import (
        AudioFlamingo3Config,
        AudioFlamingo3EncoderConfig,
        MusicFlamingoConfig,
        Qwen2Config,
    )

    audio_config = AudioFlamingo3EncoderConfig(
        num_mel_bins=128,
        num_hidden_layers=shape.encoder_layers,
        hidden_size=shape.encoder_hidden_size,
        num_attention_heads=shape.encoder_heads,
        intermediate_size=4 * shape.encoder_hidden_size,
        max_source_positions=1500,
    )
    text_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    audio, bos, eos = (tokenizer.get_vocab()[token] for token in AUDIO_TOKENS)
    sizes: dict[str, Any] = {
        "audio_config": audio_config,
        "text_config": text_config,
        "audio_token_id": audio,
    }
    if shape.architecture == "AudioFlamingo3ForConditionalGeneration":
        return AudioFlamingo3Config(**sizes)
    sizes["max_position_embeddings"] = float(shape.max_audio_seconds)  # the time embedding's axis
    return MusicFlamingoConfig(**sizes, audio_bos_token_id=bos, audio_eos_token_id=eos)


def draw_weights(model: PreTrainedModel, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw each weight, in the order of the names, so that every layer keeps its input's scale."""
    import torch

    weights = {}
    for name, like in sorted(model.state_dict().items()):
        if "norm" in name or like.dim() == 1:
            weights[name] = torch.full(like.shape, float(name.endswith("weight")))
            continue
        fan_in = like[0].numel() if "embed" not in name else 1
        weights[name] = torch.randn(like.shape, generator=generator) * gain(name) / fan_in**0.5
    return weights


def gain(name: str) -> float:
    """How much a layer strengthens its input: found by trying, so that the context decides."""
    return GAINS.get(name.split(".")[-2], 1.0)


GAINS = {
    "embed_positions": 0.1,  # else the time in the window drowns what is heard
    "q_proj": 2.0,  # sharp attention: a token of the song or of the prompt stands out
    "k_proj": 2.0,
    "o_proj": 1.6,
    "linear_2": 2.0,
}


def successor_weights(tokenizer: Qwen2Tokenizer, embeddings: torch.Tensor) -> torch.Tensor:
    """An output layer that favours, after each token, those that follow it in `CORPUS`.

    Returns (vocab_size, hidden_size). All rows have about the same length, so that no common word
    wins everywhere; a token is weighed down after itself; the rows of tokens that are not in the
    text are zero, the audio tokens' among them.
    """
    import torch

    size, width = embeddings.shape
    follows = torch.zeros(size, size)
    for line in successor_lines(tokenizer):
        ids = [*tokenizer.encode(f"\n{line}"), tokenizer.eos_token_id]  # answers follow a newline
        for token, successor in pairwise(ids):
            follows[successor, token] += 1
    occurs = follows.any(dim=1)
    follows = (follows / follows.sum(0).clamp(min=1)).sqrt()
    follows /= follows.norm(dim=1, keepdim=True).clamp(min=1e-6)
    follows -= SELF_PENALTY * torch.diag(occurs.float())
    follows[tokenizer.eos_token_id] *= END_OF_TURN_GAIN
    if THINK_TOKENS[1] in tokenizer.get_vocab():
        follows[tokenizer.get_vocab()[THINK_TOKENS[1]]] *= END_OF_REASONING_GAIN
    return SUCCESSOR_LOGIT / width * follows @ embeddings


def successor_lines(tokenizer: Qwen2Tokenizer) -> list[str]:
    """What answers are made of; where the vocabulary has the tags, each begins with reasoning."""
    lines = CORPUS.splitlines()
    if THINK_TOKENS[0] not in tokenizer.get_vocab():
        return lines
    opened, closed = THINK_TOKENS
    return [f"{opened}{line}{closed}{answer}" for line, answer in pairwise([*lines, lines[0]])]


SUCCESSOR_LOGIT = 24.0  # makes the best token's probability about a half
SELF_PENALTY = 0.6  # fewer loops
END_OF_TURN_GAIN = 1.9  # some answers end within 64 tokens
END_OF_REASONING_GAIN = 2.0  # and some have come to their answer by then
