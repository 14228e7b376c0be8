"""What the rows of a call about one song share: the keys and values up to the song's end.

They are computed once, for one row, and kept once, however many rows attend to them: a row's cache
holds what comes behind the song alone. transformers' own cache would hold, copy at each step and
read the song once for every row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "song_prefix"  # the name among transformers' attention implementations
ROOM_TOKENS = 256  # by which the cache of a call grows
MAX_SCORES = 2**24  # float32, that are in memory at a time


@dataclass(frozen=True, slots=True, eq=False)
class SongPrefix:
    """The keys and values of a prompt's first tokens, the last of which ends the clip of that uuid:
    for each layer two tensors of shape (1, key_value_heads, len(token_ids), head_dim)."""

    uuid: str
    token_ids: tuple[int, ...]
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, uuid: str, token_ids: Sequence[int], cache: Cache) -> "SongPrefix":
        """What a forward pass over the tokens has left in the cache of one row."""
        layers: Any = cache.layers
        states = tuple((layer.keys.clone(), layer.values.clone()) for layer in layers)
        return cls(uuid, tuple(token_ids), states)

    @contextmanager
    def shared_by(self, language_model: Any) -> Iterator[None]:
        """Every row that the model computes in the block comes behind the prefix."""
        modules = [layer.self_attn for layer in language_model.layers]
        for module, states in zip(modules, self.layers, strict=True):
            module.song_prefix = states
        try:
            yield
        finally:
            for module in modules:
                module.song_prefix = None


class RowsLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The keys and values of rows that come behind a prefix, with room for more of them: a token
    more is written there, where transformers' own layer copies all that came before."""

    def __init__(self, prefix_length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prefix_length = prefix_length
        self._length = 0
        self._room: tuple[torch.Tensor, ...] = ()  # keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the rows have behind the prefix, the new tokens included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[-2]
        if not self._room or self._length > self._room[0].shape[-2]:
            length = self._length + ROOM_TOKENS
            old = (self.keys, self.values)
            self._room = tuple(_with_room(states, key_states, start, length) for states in old)
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start : self._length] = new
        self.keys, self.values = (room[:, :, : self._length] for room in self._room)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._prefix_length + self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


def _with_room(
    old: torch.Tensor | None, like: torch.Tensor, old_length: int, length: int
) -> torch.Tensor:
    num_rows, num_heads, _, width = like.shape
    room = like.new_empty((num_rows, num_heads, length, width))
    if old is not None and old_length:
        room[:, :, :old_length] = old
    return room


def rows_cache(num_layers: int, prefix_length: int = 0) -> Cache:
    return Cache(layers=[RowsLayer(prefix_length) for _ in range(num_layers)])


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention implementation of transformers: over the prefix, where the rows share one, and
    over each row's own, put together by their log-sum-exps (https://arxiv.org/abs/2402.05099).

    `query` is (rows, heads, length, head_dim), `key` and `value` (rows, key_value_heads, …), the
    result (rows, length, heads, head_dim). The mask, True where a query may look, is as long as
    prefix and row together; there is none where one token looks at all.
    """
    prefix = getattr(module, "song_prefix", None)
    if prefix is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    prefix_length = prefix[0].shape[-2]
    mask = None if attention_mask is None else attention_mask[..., prefix_length:]
    of_prefix = _attend_in_parts(query, prefix[0], prefix[1], scale)
    of_row = _attend(query, key, value, scale, mask)
    return _combine(of_prefix, of_row).to(query.dtype).transpose(1, 2).contiguous(), None


_Attended = tuple[torch.Tensor, torch.Tensor]  # values, and the log-sum-exp of their scores


def _attend_in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> _Attended:
    """Queries of all rows over keys and values of one, a few rows at a time."""
    num_scores = query.shape[1] * query.shape[2] * key.shape[2]
    parts = torch.split(query, max(1, MAX_SCORES // num_scores))
    # One row for the keys' one: the rows become further queries of it.
    attended = [_attend(_as_one_row(part), key, value, scale) for part in parts]
    values = [_as_rows(out, part) for (out, _), part in zip(attended, parts, strict=True)]
    sums = [_as_rows(lse, part) for (_, lse), part in zip(attended, parts, strict=True)]
    return torch.cat(values), torch.cat(sums)


def _as_one_row(query: torch.Tensor) -> torch.Tensor:
    """(rows, heads, length, width) to (1, heads, rows * length, width)."""
    return query.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _as_rows(attended: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    num_rows, num_heads, length, _ = query.shape
    return attended.view(num_heads, num_rows, length, -1).transpose(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
) -> _Attended:
    """Values (rows, heads, length, head_dim) and log-sum-exps (rows, heads, length, 1), float32."""
    num_rows, num_heads, length, width = query.shape
    num_groups = key.shape[1]
    # The heads of a group look at the same keys: they become further queries.
    grouped = query.float().reshape(num_rows, num_groups, -1, width)
    scores = torch.matmul(grouped, key.float().transpose(-1, -2)).mul_(scale)
    if mask is not None:
        heads = num_heads // num_groups
        shaped = scores.view(num_rows, num_groups, heads, length, -1)
        shaped.masked_fill_(~mask.unsqueeze(2), torch.finfo(scores.dtype).min)
    lse = scores.logsumexp(-1, keepdim=True)
    values = torch.matmul(scores.sub_(lse).exp_(), value.float())
    return values.view(query.shape), lse.view(num_rows, num_heads, length, 1)


def _combine(one: _Attended, other: _Attended) -> torch.Tensor:
    total = torch.logaddexp(one[1], other[1])
    return one[0] * (one[1] - total).exp() + other[0] * (other[1] - total).exp()


def use_song_prefixes(language_model: Any) -> None:
    """Let a language model of transformers attend to what its rows share."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    language_model.set_attn_implementation(ATTENTION)
