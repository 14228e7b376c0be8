"""A tokenizer whose vocabulary is the words of the questions and answers, numbers and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from adapter.random_model import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS
from demo_training.questions import DRAWN, FIXED, PRESETS, WORDINGS, draw_questions
from demo_training.songs import make_song

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NUM_NUMBERS = 151  # 0 to 150, a token each: the seconds and tempos that are spoken of
# Runs of letters, of digits, of other signs, of white space: a number whole, without its space.
SPLIT = r"\p{N}+| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
NUM_CORPUS_SONGS = 400


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: any text has tokens, a known word one. The same each time."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = {word for text in corpus() for word, _ in pre_tokenizer.pre_tokenize_str(text)}
    known = sorted(pre_tokenizers.ByteLevel.alphabet()) + [str(n) for n in range(10, NUM_NUMBERS)]
    known += sorted(word for word in words if word not in known and not word.isdecimal())
    # Without merges: `ignore_merges` takes a word that is known as a whole, else its bytes.
    vocabulary = {token: index for index, token in enumerate(known)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS),
    )


def corpus() -> Iterable[str]:
    """The chat template's own words, all wordings, and questions about many songs."""
    rng = np.random.default_rng(0)
    yield "You are a helpful assistant.user\nassistant\n"
    for wordings in WORDINGS.values():
        yield from wordings
    kinds = [*FIXED, *DRAWN, *PRESETS]
    for _ in range(NUM_CORPUS_SONGS):
        song = make_song(rng, seconds=40, num_parts=5)
        for question in draw_questions(rng, song, kinds):
            yield question.prompt
            yield question.answer
