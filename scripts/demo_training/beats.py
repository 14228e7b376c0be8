"""How the encoder comes to hear a tempo early: each head of its first layer starts out looking one
beat back, at another tempo each. It is set by hand through the positions, then trained on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

POSITIONS_A_SECOND = 50
BEATS_PER_MINUTE = (96, 120, 144)  # one for each head; the slowest tempo has none of these
NUM_RATES = 16  # the quickest of the positions' rates: periods from 6 to 120 positions
SHARPNESS = 12.0  # the attention logit of the position a beat ago, about


def sinusoids(length: int, width: int) -> Tensor:
    """Whisper's positions: sines, then cosines, of periods from 2π to 20,000π positions."""
    angles = torch.arange(length)[:, None] * rates(width)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def rates(width: int) -> Tensor:
    """Radians a position: width / 2 of them, from 1 to 1/10,000."""
    return torch.exp(torch.linspace(0.0, -math.log(10_000.0), width // 2))


@torch.no_grad()
def set_beats(tower: Any) -> None:
    """Write into the first layer's queries and keys; the rates' sines and cosines fill a head."""
    attention = tower.layers[0].self_attn
    width = attention.embed_dim
    turned = rates(width)[:NUM_RATES]
    sines, cosines = torch.arange(NUM_RATES), torch.arange(NUM_RATES) + width // 2
    strength = (SHARPNESS / NUM_RATES * attention.head_dim**0.5) ** 0.5
    for head, bpm in enumerate(BEATS_PER_MINUTE):
        first = head * attention.head_dim + torch.arange(NUM_RATES)
        second = first + NUM_RATES
        back = turned * 60 / bpm * POSITIONS_A_SECOND
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight[head * attention.head_dim : (head + 1) * attention.head_dim] = 0.0
        attention.k_proj.weight[first, sines] = strength
        attention.k_proj.weight[second, cosines] = strength
        attention.q_proj.weight[first, sines] = strength * back.cos()
        attention.q_proj.weight[first, cosines] = -strength * back.sin()
        attention.q_proj.weight[second, cosines] = strength * back.cos()
        attention.q_proj.weight[second, sines] = strength * back.sin()
