"""How a model of this size finds "second 45": the time that RoTE turns into its audio embeddings is
made readable by hand, and what reads it is held as it is while all else is trained.

RoTE turns the first 40 dimensions of an embedding by angles that follow from its time alone. Where
these hold the same constant in all embeddings, the turned ones are a code of the time. A number's
token is given the vector that, of all codes, is most like those of its own second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from demo_training.hearing import EMBEDDINGS_A_SECOND, WINDOW_SECONDS, turns

NUM_CODE_DIMS = 20  # of the language model's width; as many as the head's slow pairs have
NUM_TIME_DIMS = 18  # of those that hold the time; SINK is another one
SINK = 18  # where the tokens that open a turn are marked: whoever is no number looks at them
MARK, SINK_LOGIT = 10.0, 24.0
FINDING_LAYERS = (0, 1)
TELLING_LAYER = 2
NUM_SECONDS = 105  # that have a code; the longest song has 100
SHARPNESS = 48.0  # the attention logit of a code with its own number's vector, about
CODE_SHARE = 0.15  # of an embedding's square length, about
STEPS, RATE = 3000, 0.1
FOUND_GAIN = 4.0  # what the finding head writes, against what another one does
GELU_SHIFT = 5.0  # gelu(x + 5) is x + 5


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """`projection` (NUM_CODE_DIMS, 40) takes a time's code to one of length about √NUM_CODE_DIMS;
    `numbers` (NUM_SECONDS, NUM_CODE_DIMS) holds vectors of that length, a row for each second. Both
    are zero behind NUM_TIME_DIMS."""

    projection: Tensor
    numbers: Tensor


def fit_clock(codes: Tensor, rates: Tensor, generator: torch.Generator) -> Clock:
    """Find the vectors whose softmax over all `codes` (25 * NUM_SECONDS, 40) lies in their second,
    however far behind the song the number stands: the head turns its pair i by `rates`[i] a token.
    """
    projection = torch.randn(NUM_TIME_DIMS, codes.shape[1], generator=generator).requires_grad_()
    numbers = torch.randn(NUM_SECONDS, NUM_TIME_DIMS, generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([projection, numbers], lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=0.01 * RATE)
    for _ in range(STEPS):
        distances = len(codes) * torch.rand(NUM_SECONDS, 1, generator=generator)
        keys = normalize_partly(codes @ projection.T)
        scores = SHARPNESS * turn(normalize(numbers, dim=1), distances * rates) @ keys.T
        shares = scores.log_softmax(1).view(NUM_SECONDS, NUM_SECONDS, EMBEDDINGS_A_SECOND)
        missed = -shares.logsumexp(2).diagonal()
        loss = missed.mean() + missed.square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        length = NUM_CODE_DIMS**0.5
        scale = length / (codes @ projection.T).norm(dim=1).mean()
        spare = NUM_CODE_DIMS - NUM_TIME_DIMS
        return Clock(
            pad(projection * scale, (0, 0, 0, spare)),
            pad(normalize(numbers, dim=1) * length, (0, spare)),
        )


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
def set_clock(
    model: Any, number_ids: list[int], opening_id: int, generator: torch.Generator
) -> None:
    """Write the clock into a model's weights: see the module's text. `opening_id` is the token that
    opens a turn."""
    rates = model.model.language_model.rotary_emb.inv_freq[-NUM_TIME_DIMS // 2 :]
    with torch.enable_grad():
        clock = fit_clock(time_codes(model, NUM_SECONDS), rates, generator)
    _set_constant(model.model.audio_tower.layer_norm, clock.projection.shape[1])
    _set_projector(model.model.multi_modal_projector, clock)
    _set_numbers(model, clock, number_ids)
    model.model.language_model.embed_tokens.weight[opening_id, SINK] = MARK
    layers = model.model.language_model.layers
    for index in FINDING_LAYERS:
        _set_finding_head(layers[index].self_attn)
        layers[index].self_attn.o_proj.weight[:NUM_CODE_DIMS] = 0.0  # the code stays as it is
        layers[index].mlp.down_proj.weight[:NUM_CODE_DIMS] = 0.0
    _set_telling_head(layers[TELLING_LAYER].self_attn)


def hold_clock(model: Any) -> None:
    """Keep training off the code, the numbers' vectors and the heads that compare them: it would
    wear them out before it has a use for them."""
    code = slice(NUM_CODE_DIMS)
    tower, projector = model.model.audio_tower, model.model.multi_modal_projector
    language_model = model.model.language_model
    turned = slice(4 * len(model.model.pos_emb.inv_freq))
    _hold(tower.layer_norm.weight, turned)
    _hold(tower.layer_norm.bias, turned)
    for linear in (projector.linear_1, projector.linear_2):
        _hold(linear.weight, code)
        _hold(linear.bias, code)
    _hold(language_model.embed_tokens.weight, (slice(None), code))
    for index in FINDING_LAYERS:
        layer = language_model.layers[index]
        head = slice(layer.self_attn.head_dim)
        _hold(layer.input_layernorm.weight, code)
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            _hold(linear.weight, head)
            _hold(linear.bias, head)
        _hold(layer.self_attn.o_proj.weight, code)
        _hold(layer.mlp.down_proj.weight, code)


def _hold(weight: Tensor, held: Any) -> None:
    def clear(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[held] = 0.0
        return grad

    weight.register_hook(clear)  # type: ignore[no-untyped-call]


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
    second_ids = number_ids[:NUM_SECONDS]
    embeddings[second_ids, :NUM_CODE_DIMS] = clock.numbers
    outputs[second_ids, :NUM_CODE_DIMS] = 0.3 * clock.numbers


def _set_finding_head(attention: Any) -> None:
    """Query head 0 and key head 0: a number looks at the embeddings of its second, all else at the
    token that opens a turn, where there is nothing to see.

    Only the slow pairs of the head's own rotation are used: they hardly turn over a song.
    """
    width = attention.head_dim
    half, pairs = width // 2, NUM_TIME_DIMS // 2
    slots = [*range(half - pairs, half), *range(width - pairs, width)]
    sink_slot = half - pairs - 1
    strength = (SHARPNESS / NUM_CODE_DIMS * width**0.5) ** 0.5
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[:width] = 0.0
        projection.weight[slots, :NUM_TIME_DIMS] = strength * torch.eye(NUM_TIME_DIMS)
    attention.k_proj.weight[sink_slot, SINK] = 1.0
    attention.q_proj.bias[sink_slot] = SINK_LOGIT * width**0.5 / MARK
    attention.v_proj.weight[:width, :NUM_CODE_DIMS] = 0.0
    attention.o_proj.weight[:, :width] *= FOUND_GAIN


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
