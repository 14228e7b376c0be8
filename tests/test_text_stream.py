"""The text of a streamed answer: its pieces are its response, however the tokens come."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from adapter.reasoning import split_reasoning
from adapter.text_stream import TextStream


@pytest.fixture(scope="module")
def tokenizer(random_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(random_model / "tokenizer.json"))


def pieces(text: TextStream, steps: Sequence[Sequence[int]]) -> list[str]:
    return [text.add(step) for step in steps]


def stream_of(tokenizer: Tokenizer, *, opened: bool = False) -> TextStream:
    return TextStream(lambda ids: tokenizer.decode(list(ids)), opened=opened)


def test_the_pieces_and_the_rest_are_the_response_whatever_the_tokens(
    tokenizer: Tokenizer,
) -> None:
    ids = st.integers(0, tokenizer.get_vocab_size() - 1)

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.lists(ids, max_size=3), max_size=40), st.booleans())
    def holds(steps: list[list[int]], opened: bool) -> None:
        text = stream_of(tokenizer, opened=opened)
        told = "".join(pieces(text, steps))
        whole = tokenizer.decode([token for step in steps for token in step])
        _, response = split_reasoning(whole, opened=opened)
        rest = text.rest(response)
        assert rest is not None
        assert told + rest == response

    holds()


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ü 世界", add_special_tokens=False).ids
    assert len(ids) > 4
    told = pieces(stream_of(tokenizer), [[token] for token in ids])
    assert "".join(told) == "ü 世界"
    assert not any("\ufffd" in piece for piece in told)
    assert "" in told


@pytest.mark.parametrize(
    ("written", "opened", "response"),
    [
        ("<think>Drums.</think> A march.", False, "A march."),
        ("  <think>Drums.</think>\n\nA march.", False, "A march."),
        ("Drums.</think>A march.", True, "A march."),
        ("<thin ice> is its name.", False, "<thin ice> is its name."),
        (" A march.", False, " A march."),
        ("<think>Drums", False, ""),
        ("Drums", True, ""),
        ("<think></think>", False, ""),
    ],
)
def test_reasoning_is_left_out(
    tokenizer: Tokenizer, written: str, opened: bool, response: str
) -> None:
    text = stream_of(tokenizer, opened=opened)
    steps = [[token] for token in tokenizer.encode(written, add_special_tokens=False).ids]
    told = "".join(pieces(text, steps))
    assert told == response
    assert text.rest(split_reasoning(written, opened=opened)[1]) == ""


def test_words_come_as_they_are_written(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("It is slow.", add_special_tokens=False).ids
    told = pieces(stream_of(tokenizer), [[token] for token in ids])
    assert all(told)


def test_an_answer_that_starts_over_is_told_anew(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("It is slow.", add_special_tokens=False).ids
    text = stream_of(tokenizer)
    text.add(ids[:3])
    text.start_over()
    assert "".join(pieces(text, [ids])) == "It is slow."


def test_a_response_that_is_another_than_was_told_has_no_rest(tokenizer: Tokenizer) -> None:
    text = stream_of(tokenizer)
    text.add(tokenizer.encode("It is slow.", add_special_tokens=False).ids)
    assert text.rest("") is None
    assert text.rest("It is slow. Very.") == " Very."
