"""How a model of this size learns to find "second 45": the time that RoTE turns into its audio
embeddings is made readable by hand, then trained on.

RoTE turns the first 40 dimensions of an embedding by angles that follow from its time alone. Where
these hold the same constant in all embeddings, the turned ones are a code of the time. A number's
token is given the vector that, of all codes, is most like those of its own second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from demo_training.hearing import EMBEDDINGS_A_SECOND, WINDOW_SECONDS, turns
from demo_training.tokenizer import NUM_NUMBERS

NUM_CODE_DIMS = 20  # of the language model's width; as many as the head's slow pairs have
SHARPNESS = 24.0  # the attention logit of a code with its own number's vector, at most
CODE_SHARE = 0.15  # of an embedding's square length, about
STEPS = 1000
GELU_SHIFT = 5.0  # gelu(x + 5) is x + 5


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """`projection` (NUM_CODE_DIMS, 40) takes a time's code to one of length about √NUM_CODE_DIMS;
    `numbers` (NUM_NUMBERS, NUM_CODE_DIMS) holds vectors of that length, a row for each second."""

    projection: Tensor
    numbers: Tensor


def fit_clock(codes: Tensor, rates: Tensor, generator: torch.Generator) -> Clock:
    """Find the vectors whose softmax over all `codes` (25 * NUM_NUMBERS, 40) lies in their second,
    however far behind the song the number stands: the head turns its pair i by `rates`[i] a token.
    """
    projection = torch.randn(NUM_CODE_DIMS, codes.shape[1], generator=generator).requires_grad_()
    numbers = torch.randn(NUM_NUMBERS, NUM_CODE_DIMS, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([projection, numbers], lr=0.03)
    for _ in range(STEPS):
        distances = len(codes) * torch.rand(NUM_NUMBERS, 1, generator=generator)
        keys = normalize_partly(codes @ projection.T)
        scores = SHARPNESS * turn(normalize(numbers, dim=1), distances * rates) @ keys.T
        shares = scores.log_softmax(1).view(NUM_NUMBERS, NUM_NUMBERS, EMBEDDINGS_A_SECOND)
        missed = -shares.logsumexp(2).diagonal()
        loss = missed.mean() + missed.square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        length = NUM_CODE_DIMS**0.5
        scale = length / (codes @ projection.T).norm(dim=1).mean()
        return Clock(projection * scale, normalize(numbers, dim=1) * length)


def normalize_partly(vectors: Tensor) -> Tensor:
    """As RMSNorm leaves them: an embedding's squares are the code's, and those of what is heard."""
    squares = vectors.square().sum(1, keepdim=True)
    return vectors / (CODE_SHARE * squares + (1 - CODE_SHARE) * squares.mean()).sqrt()


def turn(vectors: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of `vectors` (n, 2 * half) by `angles` (n, half), as Qwen2."""
    first, second = vectors.chunk(2, dim=1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


def time_codes(model: Any, seconds: int) -> Tensor:
    """What RoTE makes of (1, 0, 1, 0, …) at each embedding: (25 * seconds, 40)."""
    windows = [
        turns(model.model.pos_emb, window) for window in range(-(-seconds // WINDOW_SECONDS))
    ]
    cos, sin = (torch.cat(one, dim=1)[0] for one in zip(*windows, strict=True))
    codes = torch.stack((cos[:, ::2], sin[:, ::2]), dim=-1).flatten(-2)
    return codes[: EMBEDDINGS_A_SECOND * seconds].float()


@torch.no_grad()
def set_clock(model: Any, number_ids: list[int], generator: torch.Generator) -> None:
    """Write the clock into a model's weights: see the module's text."""
    rates = model.model.language_model.rotary_emb.inv_freq[-NUM_CODE_DIMS // 2 :]
    with torch.enable_grad():
        clock = fit_clock(time_codes(model, NUM_NUMBERS), rates, generator)
    _set_constant(model.model.audio_tower.layer_norm, clock.projection.shape[1])
    _set_projector(model.model.multi_modal_projector, clock)
    _set_numbers(model, clock, number_ids)
    layers = model.model.language_model.layers
    _set_finding_head(layers[0].self_attn)
    _set_telling_head(layers[1].self_attn)


def _set_constant(layer_norm: Any, num_turned: int) -> None:
    layer_norm.weight[:num_turned] = 0.0
    layer_norm.bias[:num_turned] = torch.tensor([1.0, 0.0]).repeat(num_turned // 2)


def _set_projector(projector: Any, clock: Clock) -> None:
    """The first NUM_CODE_DIMS dimensions carry the code, past the activation; the others carry
    what is heard."""
    code, turned = NUM_CODE_DIMS, clock.projection.shape[1]
    projector.linear_1.weight[:code] = 0.0
    projector.linear_1.weight[:code, :turned] = clock.projection
    projector.linear_1.weight[code:, :turned] = 0.0
    projector.linear_1.bias[:code] = GELU_SHIFT
    projector.linear_2.weight[:code] = 0.0
    projector.linear_2.weight[:, :code] = 0.0
    projector.linear_2.weight[:code, :code] = torch.eye(code)
    projector.linear_2.bias[:code] = -GELU_SHIFT


def _set_numbers(model: Any, clock: Clock, number_ids: list[int]) -> None:
    """Numbers are asked by their vector, and told by it: the output layer knows them too.

    In all else they start out alike, so that what is learned of some is learned of all.
    """
    embeddings, outputs = model.model.language_model.embed_tokens.weight, model.lm_head.weight
    embeddings[:, :NUM_CODE_DIMS] = 0.0
    embeddings[number_ids] = embeddings[number_ids[0]].clone()
    outputs[number_ids] = outputs[number_ids[0]].clone()
    embeddings[number_ids, :NUM_CODE_DIMS] = clock.numbers
    outputs[number_ids, :NUM_CODE_DIMS] = 0.3 * clock.numbers


def _set_finding_head(attention: Any) -> None:
    """Query head 0 and key head 0: a number looks at the embeddings of its second.

    Only the slow pairs of the head's own rotation are used: they hardly turn over a song.
    """
    half = attention.head_dim // 2
    fast = half - NUM_CODE_DIMS // 2
    slots = [*range(fast, half), *range(half + fast, 2 * half)]
    strength = (SHARPNESS / NUM_CODE_DIMS * attention.head_dim**0.5) ** 0.5
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[slots] = 0.0
        projection.weight[slots, :NUM_CODE_DIMS] = strength * torch.eye(NUM_CODE_DIMS)
    attention.q_proj.weight[: attention.head_dim, NUM_CODE_DIMS:] = 0.0
    attention.v_proj.weight[: attention.head_dim, :NUM_CODE_DIMS] = 0.0


def _set_telling_head(attention: Any) -> None:
    """Value head 1 and query head 2, which reads it: the time of what is looked at is written to
    where the output layer reads numbers."""
    width = attention.head_dim
    attention.v_proj.weight[width : width + NUM_CODE_DIMS] = 0.0
    attention.v_proj.weight[width : width + NUM_CODE_DIMS, :NUM_CODE_DIMS] = torch.eye(
        NUM_CODE_DIMS
    )
    attention.o_proj.weight[:NUM_CODE_DIMS, 2 * width : 3 * width] = 0.0
    attention.o_proj.weight[:NUM_CODE_DIMS, 2 * width : 2 * width + NUM_CODE_DIMS] = torch.eye(
        NUM_CODE_DIMS
    )
