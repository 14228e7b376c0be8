"""A case through an engine, on the adapter's own way there, against Hugging Face's answers."""

import asyncio
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from adapter.admission import Party
from adapter.audio import Song, cut
from adapter.billing import Meter
from adapter.checkpoint import Checkpoint, load_checkpoint
from adapter.compat import Scheduler, Ticket
from adapter.prompting import Prompter
from adapter.request import Clip, EngineRequest, Sampling
from tests.fakes import Fixed
from tests.parity.cases import RATE, Case, Question, heard, play
from tests.parity.engines import Heard, ListeningEngine
from tests.reference import Reference, ReferenceAnswer

TOLERANCE = 1e-3  # of a log-probability, and the margin under which a step counts as undecided
TIMEOUT_SECONDS = 600
request_ids = map(str, itertools.count())


@dataclass(frozen=True)
class Outcome:
    """What a comparison found. `undecided` counts the answers with a step at which the reference's
    two best candidates are closer than the tolerance: they are compared up to there."""

    differences: tuple[str, ...] = ()
    answers: int = 0
    undecided: int = 0
    worst_logprob_difference: float = 0.0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.differences + other.differences,
            self.answers + other.answers,
            self.undecided + other.undecided,
            max(self.worst_logprob_difference, other.worst_logprob_difference),
        )


class References:
    """Hugging Face's answers for one checkpoint; each is computed once."""

    def __init__(self, model_dir: Path) -> None:
        self._reference = Reference(model_dir)
        self._answers: dict[Question, ReferenceAnswer] = {}

    def answer(self, question: Question) -> ReferenceAnswer:
        if question not in self._answers:
            inputs = self._reference.plain_inputs(heard(question), question.prompt)
            self._answers[question] = self._reference.generate(inputs, question.max_new_tokens)
        return self._answers[question]


class Bench:
    """A checkpoint under an engine, beside its reference."""

    def __init__(self, model_dir: Path, engine: ListeningEngine, references: References) -> None:
        self.checkpoint: Checkpoint = load_checkpoint(str(model_dir))
        self.engine = engine
        self._prompter = Prompter(self.checkpoint)
        self._references = references

    async def compare(self, case: Case) -> Outcome:
        """Ask a case, a warm one twice, and hold every answer against the reference."""
        for question in case.questions:
            self._references.answer(question)
        await self.engine.forget()
        outcome = await self._ask(case)
        if case.warm:
            outcome += await self._ask(case)
        return outcome

    async def _ask(self, case: Case) -> Outcome:
        tickets = [Ticket(partial(self._make_request, question)) for question in case.questions]
        # A scheduler belongs to one event loop.
        scheduler = Scheduler(
            Fixed(self.engine),
            Meter(),
            continuous=self.engine.continuous,
            max_num_seqs=64,
            max_group_size=8,
        )
        await scheduler.run(
            tickets,
            group_size=case.group_size,
            timeout_seconds=TIMEOUT_SECONDS,
            party=Party(),
        )
        pairs = zip(case.questions, tickets, strict=True)
        return sum((self._judge(*pair) for pair in pairs), Outcome())

    async def _make_request(self, question: Question) -> EngineRequest:
        clip = await asyncio.to_thread(self._clip, question)
        num_audio_tokens = (
            0 if clip is None else self.checkpoint.num_audio_tokens(len(clip.samples))
        )
        return EngineRequest(
            request_id=next(request_ids),
            prompt_token_ids=self._prompter.encode(question.prompt, with_audio=clip is not None),
            clip=clip,
            num_audio_tokens=num_audio_tokens,
            sampling=Sampling(max_new_tokens=question.max_new_tokens),
        )

    def _clip(self, question: Question) -> Clip | None:
        if question.melody is None:
            return None
        samples = play(question.melody)
        digest = hashlib.sha256(samples).hexdigest()
        return cut(
            Song(samples, len(samples) / RATE, digest, decode_seconds=0.0),
            start_seconds=None if question.first is None else question.first / RATE,
            end_seconds=None if question.last is None else question.last / RATE,
            max_seconds=self.checkpoint.max_clip_seconds(),
            audible=self.checkpoint.audible_samples,
        )

    def _judge(self, question: Question, ticket: Ticket) -> Outcome:
        if ticket.error is not None or ticket.request is None:
            return Outcome((f"{question}: failed with {ticket.error!r}",), answers=1)
        told = self.engine.heard[ticket.request.request_id]
        return judge(str(question), ticket.token_ids, told, self._references.answer(question))


def judge(name: str, token_ids: Sequence[int], told: Heard, expected: ReferenceAnswer) -> Outcome:
    """Compare one answer with the reference's, as far as rounding cannot choose otherwise."""
    decided = expected.decided(TOLERANCE)
    undecided = decided < len(expected.token_ids)
    end = decided if undecided else None
    if told.prompt_token_ids != expected.prompt_token_ids:
        differences = (f"{name}: the prompt has other ids",)
        return Outcome(differences, 1, int(undecided))
    if list(token_ids)[:end] != expected.token_ids[:end]:
        differences = (f"{name}: {list(token_ids)} instead of {expected.token_ids}",)
        return Outcome(differences, 1, int(undecided))
    distances = np.abs(np.subtract(told.logprobs[:decided], expected.logprobs[:decided]))
    worst = float(distances.max(initial=0.0))  # NaN where any is NaN
    if not worst <= TOLERANCE:
        differences = (f"{name}: a log-probability differs by {worst:.2g}",)
        return Outcome(differences, 1, int(undecided), worst)
    return Outcome((), 1, int(undecided), worst)
