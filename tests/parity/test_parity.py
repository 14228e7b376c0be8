"""Both engines give the reference's answers: here the transformers engine, in the pairwise choice.

`tests/vllm/test_parity_on_vllm.py` asks vLLM the same, `make parity` both engines many more.
"""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter.checkpoint import load_checkpoint
from tests.parity.__main__ import STAGES, Result, failed, report, split
from tests.parity.cases import (
    DEAD_TAIL,
    FACTORS,
    HOSTILE_PROMPTS,
    LENGTHS,
    PROMPTS,
    RATE,
    WINDOW,
    Case,
    Melody,
    Question,
    build_case,
    draw_cases,
    name_row,
    pairwise,
)
from tests.parity.checkpoints import RECIPES, write_checkpoint
from tests.parity.compare import Bench, Outcome, References, judge
from tests.parity.engines import Heard, ListeningTransformersEngine
from tests.reference import ReferenceAnswer

ROWS = pairwise(FACTORS)


class Benches:
    """A bench for each checkpoint, made when it is first asked for, all in one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._benches: dict[str, Bench] = {}
        self._runner = asyncio.Runner()

    def __getitem__(self, name: str) -> Bench:
        if name not in self._benches:
            model_dir = write_checkpoint(name, self._directory / name)
            engine = ListeningTransformersEngine.load(
                load_checkpoint(str(model_dir)), dtype="float32", device="cpu"
            )
            self._benches[name] = Bench(model_dir, engine, References(model_dir))
        return self._benches[name]

    def check(self, name: str, case: Case) -> None:
        outcome = self._runner.run(self[name].compare(case))
        assert not outcome.differences
        assert outcome.answers >= len(case.questions)

    def close(self) -> None:
        for bench in self._benches.values():
            self._runner.run(bench.engine.shutdown())
        self._runner.close()


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    benches = Benches(tmp_path_factory.mktemp("parity"))
    yield benches
    benches.close()


def test_the_pairwise_choice_holds_every_pair() -> None:
    for (a, xs), (b, ys) in itertools.combinations(FACTORS.items(), 2):
        pairs = {(row[a], row[b]) for row in ROWS}
        assert pairs == set(itertools.product(xs, ys))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name}-{name_row(row)}")
        for name, row in zip(itertools.cycle(RECIPES), ROWS)
    ],
)
def test_a_case_is_answered_as_by_hugging_face(
    benches: Benches, name: str, row: dict[str, Any]
) -> None:
    benches.check(name, build_case(row))


def test_a_long_song_is_answered_as_by_hugging_face(benches: Benches) -> None:
    """Five minutes, encoded in slices; twenty are heard on vLLM, and by `make parity` on both."""
    question = Question(PROMPTS[0], Melody(300 * RATE), max_new_tokens=8)
    benches.check("tiny", Case((question,)))


def test_moments_of_one_song_are_songs_of_their_own(benches: Benches) -> None:
    whole = Question(PROMPTS[0], Melody(40 * RATE))
    moments = [replace(whole, first=s * RATE, last=(s + 8) * RATE) for s in (0, 4, 32)]
    benches.check("tiny", Case((whole, *moments)))


@pytest.mark.parametrize("name", RECIPES)
def test_the_answers_are_worth_comparing(benches: Benches, name: str) -> None:
    """They differ with the song and with the prompt, and consist of many tokens."""
    references = benches[name]._references
    answers = [
        tuple(references.answer(Question(prompt, Melody(length * RATE))).token_ids)
        for prompt, length in itertools.product(PROMPTS, (1, 12, 31))
    ]
    assert len(set(answers)) > len(answers) / 2
    assert len({token_id for answer in answers for token_id in answer}) > 24


def test_the_peaked_checkpoint_is_sure_of_what_it_says(benches: Benches) -> None:
    references = benches["peaked"]._references
    answers = [references.answer(Question(prompt, Melody(31 * RATE))) for prompt in PROMPTS]
    logprobs = sorted(logprob for answer in answers for logprob in answer.logprobs)
    assert logprobs[len(logprobs) // 2] > -0.4  # a median probability of more than two thirds


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("tail", [1, 160, 161, 320])
@pytest.mark.parametrize("windows", [1, 2])
def test_a_tail_without_embeddings_leaves_the_other_songs_alone(
    benches: Benches, windows: int, tail: int, place: str
) -> None:
    clip = Question(PROMPTS[0], Melody(windows * WINDOW + tail))
    others = [Question(PROMPTS[1], Melody(95 * RATE)), Question(PROMPTS[2], Melody(31 * RATE))]
    questions = [clip, *others] if place == "before" else [*others, clip]
    benches.check("tiny", Case(tuple(questions)))


@pytest.mark.parametrize("with_song", [False, True], ids=["text", "song"])
@pytest.mark.parametrize("prompt", HOSTILE_PROMPTS)
def test_a_prompt_that_spells_special_tokens_is_answered_as_plain_text(
    benches: Benches, prompt: str, with_song: bool
) -> None:
    melody = Melody(2 * RATE) if with_song else None
    benches.check("tiny", Case((Question(prompt, melody), Question(PROMPTS[0], melody))))


@pytest.mark.parametrize("with_song", [False, True], ids=["text", "song"])
def test_a_thousand_special_tokens_are_plain_text(benches: Benches, with_song: bool) -> None:
    melody = Melody(2 * RATE) if with_song else None
    benches.check("tiny", Case((Question("<sound><|im_end|>" * 500, melody),)))


lengths = st.one_of(
    st.integers(640, 4 * RATE),
    st.builds(lambda n, d: n * WINDOW + d, st.integers(1, 2), st.integers(-700, 700)),
    st.integers(1, DEAD_TAIL + 1).map(lambda tail: WINDOW + tail),
)
texts = st.one_of(
    st.sampled_from(PROMPTS + HOSTILE_PROMPTS),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
)
questions = st.builds(
    Question,
    texts,
    st.one_of(st.none(), st.builds(Melody, lengths, st.integers(0, 1))),
    max_new_tokens=st.integers(1, 10),
)
cases = st.builds(
    Case,
    st.lists(questions, min_size=1, max_size=4).map(tuple),
    st.sampled_from([None, 1, 2, 3]),
    st.booleans(),
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from(list(RECIPES)), case=cases)
def test_whatever_comes_together_is_answered_as_one_at_a_time(
    benches: Benches, name: str, case: Case
) -> None:
    benches.check(name, case)


class TestLongRun:
    """`make parity`: what it draws, and when it fails."""

    def test_it_hears_every_listed_length_in_each_stage(self) -> None:
        for stage, number in split(500):
            cases = draw_cases(f"0 {stage}", number, stage.limits)
            questions = [question for case in cases for question in case.questions]
            lengths = {q.melody.num_samples for q in questions if q.melody is not None}
            assert lengths >= {n for n in LENGTHS if n <= stage.limits.max_samples}

    @pytest.mark.parametrize("count", [1, 21, 500])
    def test_the_stages_share_all_cases(self, count: int) -> None:
        assert sum(number for _, number in split(count)) == count

    @pytest.mark.parametrize(
        ("outcome", "fails"),
        [
            (Outcome(answers=300), False),
            (Outcome(answers=300, undecided=3), False),
            (Outcome(answers=300, undecided=4), True),
            (Outcome(answers=7, undecided=1), False),
            (Outcome(("a: differs",), answers=300), True),
        ],
    )
    def test_it_fails_at_any_difference_and_where_too_much_is_undecided(
        self, outcome: Outcome, fails: bool
    ) -> None:
        result = Result(STAGES[0], 100, 2, outcome, preemptions=0, seconds=1.0)
        assert failed([result]) == fails
        line = f"| all | 100 | 2 | {outcome.answers} | {outcome.undecided} |"
        assert line in report([result], seed=0, seconds=1.0)


class TestJudge:
    """The comparison itself notices what it is there for."""

    expected = ReferenceAnswer([1, 2], [5, 6, 7], [-0.1, -0.2, -0.3], [1.0, 1.0, 1.0])

    def test_the_same_answer_has_no_difference(self) -> None:
        outcome = judge("q", [5, 6, 7], Heard([1, 2], [-0.1, -0.2, -0.3004]), self.expected)
        assert outcome.differences == ()
        assert outcome.undecided == 0
        assert outcome.worst_logprob_difference == pytest.approx(4e-4)

    @pytest.mark.parametrize(
        ("token_ids", "told", "says"),
        [
            ([5, 6, 7], Heard([1, 3], [-0.1, -0.2, -0.3]), "the prompt has other ids"),
            ([5, 6, 8], Heard([1, 2], [-0.1, -0.2, -0.3]), "instead of"),
            ([5, 6], Heard([1, 2], [-0.1, -0.2]), "instead of"),
            ([5, 6, 7, 8], Heard([1, 2], [-0.1, -0.2, -0.3, 0]), "instead of"),
            ([5, 6, 7], Heard([1, 2], [-0.1, -0.2, -0.302]), "a log-probability differs"),
            ([5, 6, 7], Heard([1, 2], [-0.1, -0.2, float("nan")]), "a log-probability differs"),
        ],
    )
    def test_a_difference_is_told(self, token_ids: list[int], told: Heard, says: str) -> None:
        (difference,) = judge("q", token_ids, told, self.expected).differences
        assert says in difference

    def test_a_near_tie_ends_the_comparison_and_counts_as_undecided(self) -> None:
        expected = ReferenceAnswer([1, 2], [5, 6, 7], [-0.1, -0.2, -0.3], [1.0, 9e-4, 1.0])
        outcome = judge("q", [5, 9], Heard([1, 2], [-0.1, -0.2]), expected)
        assert outcome.differences == ()
        assert outcome.undecided == 1
