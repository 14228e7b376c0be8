"""How the rows of one `generate()` call are drawn and ended, each as it would be alone."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from adapter.repetition import Repetition
from adapter.request import FinishReason, Sampling

if TYPE_CHECKING:
    import xgrammar

    from adapter.row_steps import RowSteps

MIN_TEMPERATURE = 0.01  # below it vLLM divides by 0.01, so that logits stay finite


class DrawRows(LogitsProcessor):
    """Makes the drawn token of each row the one with the highest score.

    The argmax of log p - log E, E exponential with mean 1, is a draw from p (the Gumbel-max
    trick). Each row has a generator of its own: a seed means the same whatever stands in the other
    rows, which one draw for the whole call, as in Hugging Face's own sampling, cannot give.
    """

    def __init__(self, seeds: Sequence[int | None], device: torch.device) -> None:
        self._generators = [_new_generator(seed, device) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        tiny = torch.finfo(noise.dtype).tiny  # log 0 would win against any score
        return scores - noise.clamp_min_(tiny).log_()


class HoldToGrammars(LogitsProcessor):
    """Leaves each row the tokens that may come next in its grammar; None is a row without one.

    It sees every step: what was drawn in the last one is the last column of `input_ids`.
    """

    def __init__(
        self,
        grammars: "Sequence[xgrammar.CompiledGrammar | None]",
        eos_token_ids: Collection[int],
    ) -> None:
        import xgrammar

        self._matchers = {
            row: xgrammar.GrammarMatcher(grammar, override_stop_tokens=sorted(eos_token_ids))
            for row, grammar in enumerate(grammars)
            if grammar is not None
        }
        self._begun = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._begun:
            self._accept(input_ids[:, -1].tolist())
        self._begun = True
        if not self._matchers:
            return scores
        size = scores.shape[-1]
        bitmask = torch.full((len(self._matchers), -(-size // 32)), -1, dtype=torch.int32)
        for index, matcher in enumerate(self._matchers.values()):
            matcher.fill_next_token_bitmask(bitmask, index)
        bits = (bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        refused = (bits.flatten(1)[:, :size] == 0).to(scores.device)
        rows = list(self._matchers)
        scores[rows] = scores[rows].masked_fill(refused, -torch.inf)
        return scores

    def _accept(self, last_ids: Sequence[int]) -> None:
        """Take the last step's tokens; behind its end a row has padding, and no grammar."""
        for row, matcher in list(self._matchers.items()):
            if not matcher.accept_token(last_ids[row]) or matcher.is_terminated():
                del self._matchers[row]


class EndRows(StoppingCriteria):
    """Ends each row at its own cap or where it repeats itself, and all of them once the call is
    cancelled.

    It sees every step: `input_ids` is (rows, prompt_length + steps). `steps` is told of each.
    """

    def __init__(
        self,
        samplings: Sequence[Sampling],
        prompt_length: int,
        device: torch.device,
        is_cancelled: Callable[[], bool],
        steps: "RowSteps | None" = None,
    ) -> None:
        caps = [sampling.max_new_tokens for sampling in samplings]
        self._max_length = prompt_length + torch.tensor(caps, device=device)
        self._is_cancelled = is_cancelled
        self._steps = steps
        self._repetitions = {
            row: Repetition()
            for row, sampling in enumerate(samplings)
            if sampling.stop_on_repetition
        }

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        if self._is_cancelled():
            return torch.ones_like(self._max_length, dtype=torch.bool)
        ended = self._max_length <= input_ids.shape[1]
        if self._repetitions or self._steps:
            last_ids = input_ids[:, -1].tolist()
            for row, repetition in self._repetitions.items():
                ended[row] |= repetition.add(last_ids[row])
            if self._steps:
                self._steps.add(last_ids, ended.tolist())
        return ended


def build_generation_config(
    samplings: Sequence[Sampling], eos_token_ids: Collection[int], pad_token_id: int
) -> GenerationConfig:
    """The configuration of one call; `samplings` differ in their caps and seeds alone.

    `do_sample` stays off, also where tokens are drawn: `DrawRows` draws, `generate()` takes the
    best, and none of the sampling options of transformers (top_k is 50 where none is set) applies.
    """
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max(sampling.max_new_tokens for sampling in samplings),
        repetition_penalty=float(samplings[0].repetition_penalty),
        eos_token_id=sorted(eos_token_ids),
        pad_token_id=pad_token_id,
    )


def build_logits_processors(
    samplings: Sequence[Sampling],
    device: torch.device,
    hold: HoldToGrammars | None = None,
) -> LogitsProcessorList:
    """The grammars, temperature, top_p, then the draw: vLLM's order. The last three are left out
    where the call is greedy."""
    sampling = samplings[0]
    processors = LogitsProcessorList([hold] if hold else [])
    if sampling.greedy:
        return processors
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(max(sampling.temperature, MIN_TEMPERATURE)))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(DrawRows([row.seed for row in samplings], device))
    return processors


def cut_answer(
    token_ids: Sequence[int], sampling: Sampling, eos_token_ids: Collection[int]
) -> tuple[tuple[int, ...], FinishReason]:
    """A row's answer without what the call appended after its end, and how it ended.

    Where a token ends it for several reasons, the order of vLLM's `check_stop` decides.
    """
    answer = tuple(token_ids[: sampling.max_new_tokens])
    repetition = Repetition()
    for length, token_id in enumerate(answer, start=1):
        if token_id in eos_token_ids:
            return answer[:length], "stop"
        if length == sampling.max_new_tokens:
            break
        if sampling.stop_on_repetition and repetition.add(token_id):
            return answer[:length], "repetition"
    return answer, "length"


def _new_generator(seed: int | None, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()  # from the operating system's entropy
    else:
        generator.manual_seed(seed)
    return generator
