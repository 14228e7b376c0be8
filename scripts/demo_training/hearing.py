"""The forward pass of the training: transformers' modules, a song heard once for many questions.

What it gives is what the served model gives (tests/test_demo_training.py), with less work: the
windows are cut to what is heard, and all questions about a song go on from one prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.musicflamingo.modeling_musicflamingo import apply_rotary_time_emb

WINDOW_SECONDS = 30
FRAMES_A_SECOND = 100
EMBEDDINGS_A_SECOND = 25
SPARE_FRAMES = 8  # behind what is heard: the convolutions reach into them


def hear(model: Any, features: Tensor, seconds: int) -> Tensor:
    """The songs' embeddings, (num_songs, 25 * seconds, width), turned by their time and projected.

    `features` are (num_songs, 128, 100 * seconds + SPARE_FRAMES): whole windows, then the rest.
    """
    model = model.model
    heard = []
    for window, start in enumerate(range(0, seconds, WINDOW_SECONDS)):
        length = min(WINDOW_SECONDS, seconds - start)
        first = start * FRAMES_A_SECOND
        whole = length == WINDOW_SECONDS
        last = first + length * FRAMES_A_SECOND + (0 if whole else SPARE_FRAMES)
        states = encode(model.audio_tower, features[:, :, first:last], length)
        cos, sin = turns(model.pos_emb, window)
        cos, sin = cos[:, : states.shape[1]], sin[:, : states.shape[1]]
        heard.append(apply_rotary_time_emb(states, cos, sin))  # type: ignore[no-untyped-call]
    return model.multi_modal_projector(torch.cat(heard, dim=1))  # type: ignore[no-any-return]


def encode(tower: Any, features: Tensor, seconds: int) -> Tensor:
    """The audio tower on a window cut behind its sound: (num_songs, 25 * seconds, width)."""
    states = torch.nn.functional.gelu(tower.conv1(features))
    states = torch.nn.functional.gelu(tower.conv2(states)).permute(0, 2, 1)
    states = states[:, : 2 * EMBEDDINGS_A_SECOND * seconds]
    states = states + tower.embed_positions.weight[: states.shape[1]]
    for layer in tower.layers:
        states = layer(states, None)
    states = tower.avg_pooler(states.permute(0, 2, 1)).permute(0, 2, 1)
    return tower.layer_norm(states)  # type: ignore[no-any-return]


def prefill(model: Any, audio: Tensor, before: Tensor, behind: Tensor) -> DynamicCache:
    """The keys and values of what all questions share: the ids `before`, the audio, `behind`."""
    language_model = model.model.language_model
    embed = language_model.embed_tokens
    texts = [embed(ids).expand(len(audio), -1, -1) for ids in (before, behind)]
    states = torch.cat((texts[0], audio, texts[1]), dim=1)
    cache = DynamicCache(config=model.config.text_config)
    language_model(inputs_embeds=states, past_key_values=cache, use_cache=True)
    return cache


def answer_logits(model: Any, cache: DynamicCache, token_ids: Tensor) -> Tensor:
    """Logits (num_songs, num_questions, length, vocabulary) of `token_ids`, padded at the end."""
    num_songs, num_questions, length = token_ids.shape
    layers: Any = cache.layers
    repeated = [
        tuple(kept.repeat_interleave(num_questions, 0) for kept in (layer.keys, layer.values))
        for layer in layers
    ]
    states = model.model.language_model(
        input_ids=token_ids.view(-1, length),
        past_key_values=DynamicCache(repeated),
        use_cache=True,
    ).last_hidden_state
    return model.lm_head(states).view(num_songs, num_questions, length, -1)  # type: ignore[no-any-return]


def turns(pos_emb: Any, window: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of a song's window, each (1, 750, 40)."""
    length = WINDOW_SECONDS * EMBEDDINGS_A_SECOND
    times = (window * length + torch.arange(length)) / EMBEDDINGS_A_SECOND
    return pos_emb(times[None], seq_len=length)  # type: ignore[no-any-return]
