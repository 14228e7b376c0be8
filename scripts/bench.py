"""Compare the adapter with Hugging Face: the same prompts about the same song, greedy.

    python scripts/bench.py                                  the demo checkpoint, a made song
    python scripts/bench.py --model nvidia/music-flamingo-2601-hf --song song.mp3 \\
        --dtype bfloat16 --allow-differences                 the real weights on a GPU

The paths, which --engine picks from:

    hf-sequential         transformers' processor and generate(), one prompt at a time
    hf-groups             the same in groups of --group-size, padded on the left
    adapter-vllm          POST /generate_batch on vLLM: a new song, then the same one again
    adapter-transformers  POST /generate_batch on transformers
    async-llm             vLLM's AsyncLLM called directly with the same samples and token ids
    vllm-openai           vLLM's own OpenAI server, a chat call for each prompt

--expect adapter-vllm/async-llm:new<=1.05 fails the run where the first path takes more than 1.05
times the wall seconds of the second with the song new.

A progress bar goes to stderr; a table and, as the last line, one JSON document go to stdout. The
exit code is 1 where a greedy answer is not the one of hf-sequential, a path failed, or an
expectation was not met.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from av.error import FFmpegError
from benchmarks.expect import check_expectations, parse_expectation
from benchmarks.floor import Device, Shape
from benchmarks.process import PATHS, TWICE, measure_floor, run_path
from benchmarks.report import (
    BASELINE,
    Difference,
    describe_machine,
    describe_outcome,
    describe_versions,
    find_differences,
    format_floor,
    format_table,
    make_floor_rows,
    make_rows,
)
from benchmarks.workload import (
    FORMATS,
    MADE_SECONDS,
    SHAPES,
    Outcome,
    Workload,
    environment_of,
    make_model,
    make_prompts,
    make_songs,
    make_warm_up_song,
    prepare_environment,
)
from tqdm import tqdm  # type: ignore[import-untyped]

DEFAULT_PATHS = ("hf-sequential", "hf-groups", "adapter-vllm")
DTYPES = ("float32", "bfloat16", "float16")
REPORTED = ("VLLM_", "ADAPTER_", "OMP_", "MKL_", "CUDA_", "TORCH_", "HF_HUB_OFFLINE", "TOKENIZERS_")
LOG_LINES = 12


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server is ended, too
    prepare_environment(demo=not args.model)
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Run the paths and print what they gave; returns the exit code."""
    machine = describe_machine()  # its load before the paths add theirs
    with tempfile.TemporaryDirectory(prefix="music-flamingo-bench-") as name:
        try:
            workload = make_workload(args, Path(name))
        except (OSError, ValueError, FFmpegError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        outcomes = run_all(args.engine, workload, Path(name), args.starts)
        return finish(args, workload, outcomes, machine, find_limits(args, workload))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", metavar="DIR_OR_HUB_ID", help="default: makes the demo checkpoint")
    add("--revision", default="main", help="of a model on the hub (%(default)s)")
    add("--shape", choices=SHAPES, help="of the demo checkpoint (tiny)")
    add("--song", type=Path, metavar="FILE", help="any audio file; default: makes one")
    add("--seconds", type=positive(float), help=f"of the song (all; made: {MADE_SECONDS:g})")
    add("--format", choices=FORMATS, default="wav", help="of the song as each path is given it")
    add("--songs", type=positive(int), default=1, help="asked about at once (%(default)s)")
    add("--prompts", type=positive(int), default=13, help="how many (%(default)s)")
    add("--max-new-tokens", type=positive(int), default=64, help="of each answer (%(default)s)")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights (%(default)s)")
    add("--group-size", type=positive(int), metavar="N",
        help="of the adapter (default: on vLLM no window, on transformers 8)")  # fmt: skip
    add("--hf-group-size", type=positive(int), default=8, metavar="N",
        help="rows of a group of hf-groups (%(default)s)")  # fmt: skip
    add("--engine", nargs="+", choices=PATHS, default=DEFAULT_PATHS, metavar="PATH",
        help=f"of {', '.join(PATHS)} ({' '.join(DEFAULT_PATHS)})")  # fmt: skip
    add("--repeats", type=positive(int), default=1, help="medians of so many runs (%(default)s)")
    add("--starts", type=positive(int), default=1,
        help="start each path so often, in turns, for medians over all (%(default)s)")  # fmt: skip
    add("--allow-differences", action="store_true",
        help="do not fail where answers differ: in bfloat16 rounding may change them")  # fmt: skip
    add("--expect", nargs="+", type=parse_expectation, default=[], metavar="A/B:STATE<=X",
        help="fail where path A takes more than X times the seconds of B")  # fmt: skip
    add("--floor", action=argparse.BooleanOptionalAction, default=True,
        help="measure the device and print what the run must take on it")  # fmt: skip
    args = parser.parse_args(argv)
    if args.model and args.shape:
        parser.error("--shape is for the demo checkpoint; leave out --model or --shape")
    return args


def positive(kind: type[int] | type[float]) -> Any:
    def parse_positive(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e9:
            raise ValueError
        return value

    parse_positive.__name__ = f"positive {kind.__name__}"  # argparse names it in its error
    return parse_positive


def make_workload(args: argparse.Namespace, folder: Path) -> Workload:
    """Raises ValueError, OSError or FFmpegError for a song that cannot be read."""
    songs = make_songs(args.song, args.seconds, args.repeats * args.songs, folder, args.format)
    starts = range(0, len(songs), args.songs)
    return Workload(
        model=args.model or make_model(args.shape or SHAPES[0], folder),
        revision=args.revision,
        rounds=tuple(songs[start : start + args.songs] for start in starts),
        warm_up_song=make_warm_up_song(folder),
        prompts=make_prompts(args.prompts),
        max_new_tokens=args.max_new_tokens,
        dtype=args.dtype,
        group_size=args.group_size,
        hf_group_size=args.hf_group_size,
    )


def find_limits(args: argparse.Namespace, workload: Workload) -> tuple[Shape, Device] | None:
    """The model's sizes and the device's rates; None, with a note, where they can't be had."""
    if not args.floor:
        return None
    try:
        return measure_floor(workload)
    except Exception as error:  # whatever torch and transformers raise: the rows stand without it
        print(f"note: no floor: {error}", file=sys.stderr)
        return None


def run_all(
    paths: Sequence[str], workload: Workload, folder: Path, starts: int = 1
) -> dict[str, Outcome]:
    """Run the paths one after the other, each second time backwards: a machine changes its pace,
    and a process has one of its own. A path that fails does not stop the others."""
    a_pass = workload.num_prompts_a_round * len(workload.rounds)
    prompts = {path: a_pass * (2 if path in TWICE else 1) for path in dict.fromkeys(paths)}
    outcomes: dict[str, Outcome] = {}
    with tqdm(total=sum(prompts.values()) * starts, unit="prompt", file=sys.stderr) as bar:
        for path in chain.from_iterable(list(prompts)[:: (-1) ** turn] for turn in range(starts)):
            due = bar.n + prompts[path]

            def report(done: int, doing: str, path: str = path) -> None:
                bar.set_description_str(f"{path}: {doing}")
                bar.update(done)

            log = folder / f"{path}.log"
            outcome = run_path(path, workload, log, report)
            outcomes[path] = outcomes.get(path, Outcome()) + outcome
            bar.update(due - bar.n)  # what a failed path left out
            if outcome.error:
                bar.write(log_tail(path, log), file=sys.stderr)
    return {path: outcomes[path] for path in prompts}


def log_tail(path: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return f"{path} failed; its log ends with:\n" + "\n".join(lines[-LOG_LINES:])


def finish(
    args: argparse.Namespace,
    workload: Workload,
    outcomes: Mapping[str, Outcome],
    machine: dict[str, Any],
    limits: tuple[Shape, Device] | None,
) -> int:
    """Print the tables, what is wrong, and the JSON document; returns the exit code."""
    differences = find_differences(outcomes)
    rows = make_rows(outcomes, differences)
    floors = make_floor_rows(outcomes, rows, workload, *limits) if limits else []
    verdicts = check_expectations(args.expect, rows)
    print(format_table(rows))
    if limits and floors:
        print(f"\n{format_floor(floors, limits[1])}\n")
    for verdict in verdicts:
        print(verdict)
    for path, outcome in outcomes.items():
        if outcome.error:
            print(f"{path}: failed: {outcome.error}")
    for difference in differences:
        print(difference)
    exit_code = judge(outcomes, differences, args)
    exit_code |= any(not verdict.met for verdict in verdicts)
    document = {
        "benchmark": "music-flamingo-adapter",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": vars(args) | {"song": args.song and str(args.song), "expect": args.expect},
        "song_seconds": workload.song_seconds,
        "prompts": workload.prompts,
        "versions": describe_versions(),
        "machine": machine,
        "environment": environment_of(REPORTED),
        "rows": [asdict(row) for row in rows],
        "measured_device": limits and asdict(limits[1]),
        "floors": [asdict(row) for row in floors],
        "expectations": [asdict(verdict) | {"met": verdict.met} for verdict in verdicts],
        "answers_agree": not differences if count_compared(outcomes) else None,
        "differences": [
            asdict(difference) | {"first_token": difference.first_token}
            for difference in differences
        ],
        "paths": {path: describe_outcome(outcome) for path, outcome in outcomes.items()},
        "exit_code": exit_code,
    }
    print(json.dumps(document, default=str))
    return exit_code


def judge(
    outcomes: Mapping[str, Outcome], differences: Sequence[Difference], args: argparse.Namespace
) -> int:
    """Say on stderr what is wrong; returns the exit code."""
    failed = [path for path, outcome in outcomes.items() if outcome.error]
    if failed:
        print(f"error: {', '.join(failed)} failed", file=sys.stderr)
    if differences:
        paths = dict.fromkeys(difference.path for difference in differences)
        hint = "" if args.dtype == "float32" else f"; in {args.dtype} rounding may do that"
        print(
            f"{'note' if args.allow_differences else 'error'}: {len(differences)} greedy answers "
            f"of {', '.join(paths)} are not those of {BASELINE}{hint} (--allow-differences "
            "accepts it)",
            file=sys.stderr,
        )
    elif not count_compared(outcomes):
        print(f"note: comparing answers takes {BASELINE} and another path", file=sys.stderr)
    return int(bool(failed or (differences and not args.allow_differences)))


def count_compared(outcomes: Mapping[str, Outcome]) -> int:
    """How many paths have answers that could be compared with the baseline's."""
    answered = [path for path, outcome in outcomes.items() if outcome.runs]
    return len(answered) - 1 if BASELINE in answered else 0


if __name__ == "__main__":
    sys.exit(main())
