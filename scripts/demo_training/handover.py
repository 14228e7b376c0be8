"""Where the language model starts: its first values read of the song what the heads read of it, and
what a number has found there is passed on to the words behind it. Trained on from there.

Value heads are rows of a projection; those that nobody fills stay random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from demo_training.clock import FOUND_GAIN, NUM_CODE_DIMS

OF_A_SECOND = ("lead", "part", "begins", "tempo")
OF_THE_SONG = ("tempo", "loop")
PASSED_BACK = (1, 2)  # tokens behind the number: "45 the violin"
CLOSENESS = (8.0, 7.5, 5.5, 5.5)  # of the rotation's quickest pairs: a token stands out from others


@torch.no_grad()
def hand_over(model: Any, heads: Any, generator: torch.Generator) -> None:
    """The finding head gets what differs from second to second, its neighbour what does not."""
    layers = model.model.language_model.layers
    width = layers[0].self_attn.head_dim
    _fill(layers[0].self_attn.v_proj.weight[:width], heads, OF_A_SECOND, generator)
    _fill(layers[0].self_attn.v_proj.weight[width:], heads, OF_THE_SONG, generator)
    _fill(layers[1].self_attn.v_proj.weight[:width], heads, OF_A_SECOND, generator)
    rates = model.model.language_model.rotary_emb.inv_freq
    _pass_on(layers[0].self_attn, layers[1].self_attn, rates)


def _fill(rows: Tensor, heads: Any, names: tuple[str, ...], generator: torch.Generator) -> None:
    """Unit rows from the heads' own, or from random mixtures of those where they are too many."""
    told = torch.cat([normalize(heads[name].weight, dim=1) for name in names])
    if len(told) > len(rows):
        told = torch.randn(len(rows), len(told), generator=generator) @ told
    rows[: len(told), :NUM_CODE_DIMS] = 0.0
    rows[: len(told), NUM_CODE_DIMS:] = normalize(told, dim=1)


def _pass_on(finding: Any, passing: Any, rates: Tensor) -> None:
    """Key head 1 with its query heads 2 and 3 looks one token back, and two: by position alone,
    through the rotation. Its values are what the finding head wrote."""
    width, half = passing.head_dim, passing.head_dim // 2
    pairs, strengths = torch.arange(len(CLOSENESS)), torch.tensor(CLOSENESS)
    passing.k_proj.weight[width:] = 0.0
    passing.k_proj.bias[width + pairs] = strengths
    for head, distance in zip((2, 3), PASSED_BACK, strict=True):
        angles = distance * rates[: len(CLOSENESS)]
        rows = slice(head * width, (head + 1) * width)
        passing.q_proj.weight[rows] = 0.0
        passing.q_proj.bias[head * width + pairs] = strengths * angles.cos()
        passing.q_proj.bias[head * width + half + pairs] = -strengths * angles.sin()
        passing.o_proj.weight[:, rows] *= FOUND_GAIN
    written = finding.o_proj.weight[:, :width]
    passing.v_proj.weight[width:] = normalize(written, dim=0).T
