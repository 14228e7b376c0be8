"""The model before its training: transformers' own classes, with weights drawn from a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor

from adapter.random_model import ModelShape, build_config, build_generation_config
from demo_training.beats import set_beats, sinusoids
from demo_training.clock import hold_clock, set_clock
from demo_training.tokenizer import NUM_NUMBERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHAPE = ModelShape(
    encoder_layers=2,
    encoder_hidden_size=96,
    encoder_heads=3,
    num_layers=3,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=256,
    rope_theta=1e12,  # most pairs of a head hardly turn over a song: the clock needs ten such
)
RESIDUAL_GAIN = 0.4  # of the layers that write to a residual stream of 2 or 3 layers
WRITING_LAYERS = ("o_proj", "down_proj", "out_proj", "fc2")


def build_network(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """A MusicFlamingoForConditionalGeneration in float32; training leaves its clock alone."""
    model: Any = transformers.MusicFlamingoForConditionalGeneration(build_config(tokenizer, SHAPE))
    model.generation_config = build_generation_config(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(_draw(name, weight, generator))
    vocabulary = tokenizer.get_vocab()
    number_ids = [vocabulary[str(number)] for number in range(NUM_NUMBERS)]
    set_beats(model.model.audio_tower)
    set_clock(model, number_ids, vocabulary["<|im_start|>"], generator)
    model.requires_grad_()
    hold_clock(model)
    return model


def _draw(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    if like.dim() == 1:
        return torch.full(like.shape, float("norm" in name and name.endswith("weight")))
    if "embed_positions" in name:
        return 0.3 * sinusoids(*like.shape)
    drawn: Tensor = torch.randn(like.shape, generator=generator)
    if "embed_tokens" in name:
        return drawn
    gain = RESIDUAL_GAIN if name.split(".")[-2] in WRITING_LAYERS else 1.0
    if "lm_head" in name:
        gain = 0.3
    if "projector" in name:
        gain = 1.5  # what is heard: as large as a text's embeddings
    scale: float = gain / like[0].numel() ** 0.5
    return scale * drawn
