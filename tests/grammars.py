"""xgrammar on the demo checkpoint's vocabulary, and answers drawn from a grammar at random."""

import random
from functools import cache
from typing import Any

import torch
import xgrammar

from adapter.random_model import build_tokenizer

MAX_TOKENS = 600


@cache
def tokenizer() -> Any:
    return build_tokenizer()


@cache
def compiler() -> xgrammar.GrammarCompiler:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer())
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def accepts(grammar: str, text: str | bytes) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler().compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.is_completed()


def draw_text(grammar: str, seed: int) -> str | None:
    """A text of the grammar, each token drawn evenly from those that may come; None where it has
    not come to its end in time."""
    rng = random.Random(seed)
    matcher = xgrammar.GrammarMatcher(compiler().compile_grammar(grammar))
    bitmask = xgrammar.allocate_token_bitmask(1, len(tokenizer()))
    token_ids: list[int] = []
    while len(token_ids) < MAX_TOKENS:
        matcher.fill_next_token_bitmask(bitmask)
        bits = bitmask[0].unsqueeze(-1) >> torch.arange(32) & 1
        token_id = rng.choice(bits.flatten()[: len(tokenizer())].nonzero().flatten().tolist())
        assert matcher.accept_token(token_id)
        if matcher.is_terminated():
            return str(tokenizer().decode(token_ids))
        token_ids.append(token_id)
    return None
