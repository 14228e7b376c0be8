"""Answers that go round in circles end at the same token on both engines."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter.repetition import MAX_PATTERN_TOKENS, MIN_REPEATS, Repetition
from adapter.request import Sampling
from adapter.sampling import cut_answer

EOS = 9


def first_repetition(token_ids: Sequence[int]) -> int | None:
    """The length of the answer with which its repetition is noticed."""
    repetition = Repetition()
    return next((at for at, token in enumerate(token_ids, 1) if repetition.add(token)), None)


@st.composite
def circling(draw: st.DrawFn) -> list[int]:
    """Token ids in which patterns, that may hold patterns, stand in a row."""
    token_ids: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        pattern = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        token_ids += pattern * draw(st.integers(1, 9))
        token_ids += draw(st.lists(st.integers(0, 2), max_size=3))
    return token_ids


@pytest.mark.vllm
@settings(deadline=None)  # the first example imports vLLM
@given(circling())
def test_the_rule_is_vllms_own(token_ids: list[int]) -> None:
    from vllm.v1.core.sched import utils

    params = utils.RepetitionDetectionParams(
        max_pattern_size=MAX_PATTERN_TOKENS, min_pattern_size=1, min_count=MIN_REPEATS
    )
    repetition = Repetition()
    for length, token_id in enumerate(token_ids, start=1):
        expected = utils.check_sequence_repetition(token_ids[:length], params)
        assert repetition.add(token_id) == expected, token_ids[:length]


@pytest.mark.parametrize("pattern_tokens", [1, 2, 7, 31, 32])
def test_the_eighth_time_ends_it(pattern_tokens: int) -> None:
    pattern = list(range(pattern_tokens))
    assert first_repetition([77, *pattern * 9]) == 1 + 8 * pattern_tokens


def test_a_longer_pattern_may_go_on() -> None:
    assert first_repetition(list(range(33)) * 20) is None


def test_seven_times_may_stand() -> None:
    assert first_repetition([*[5] * 7, 6] * 7) is None


@pytest.mark.parametrize(
    ("token_ids", "cap", "expected"),
    [
        ([5] * 20, 20, (8, "repetition")),
        ([5] * 20, 8, (8, "length")),
        ([*[5] * 7, EOS, 5], 20, (8, "stop")),
        ([5, 6] * 9, 20, (16, "repetition")),
    ],
)
def test_what_ends_an_answer_first_is_its_reason(
    token_ids: list[int], cap: int, expected: tuple[int, str]
) -> None:
    answer, reason = cut_answer(
        token_ids, Sampling(max_new_tokens=cap, stop_on_repetition=True), [EOS]
    )
    assert (len(answer), reason) == expected


def test_nothing_is_ended_that_did_not_ask_for_it() -> None:
    assert cut_answer([5] * 20, Sampling(max_new_tokens=20), [EOS]) == ((5,) * 20, "length")
