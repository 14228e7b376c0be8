"""scripts/bench.py: one run on the demo checkpoint, and its judgement on paths that are made up."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench  # noqa: E402
from benchmarks.process import PATHS  # noqa: E402
from benchmarks.report import find_differences, make_rows  # noqa: E402
from benchmarks.workload import (  # noqa: E402
    Answer,
    Outcome,
    Report,
    Run,
    Workload,
    decode,
    environment_of,
    make_prompts,
    make_songs,
    read_song,
)

SHORT = ["--seconds", "3", "--prompts", "3", "--max-new-tokens", "4"]
MADE_UP = [*SHORT, "--no-floor", "--model", "none"]


def answer_alike(workload: Workload, report: Report) -> Outcome:
    return made_up(workload, report, "a calm song", (1, 2, 3))


def answer_otherwise(workload: Workload, report: Report) -> Outcome:
    return made_up(workload, report, "a loud song", (1, 5, 3))


def raise_error(*_: object) -> Outcome:
    print("the last words")
    raise ImportError("No module named 'vllm'")


def die(*_: object) -> Outcome:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def made_up(workload: Workload, report: Report, text: str, ids: tuple[int, ...]) -> Outcome:
    answers = tuple(Answer(text, len(ids), ids) for _ in workload.prompts)
    report(len(answers), "answering")
    return Outcome((Run(0, "new", 2.0, answers),))


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Runs made-up paths in real processes: exit code, document, stdout and stderr."""

    def run(*options: str, **paths: Callable[..., Outcome]) -> tuple[int, dict[str, Any], str]:
        names = {name.replace("_", "-"): path for name, path in paths.items()}
        for name, path in names.items():
            monkeypatch.setitem(PATHS, name, f"{__name__}:{path.__name__}")
        args = bench.parse([*MADE_UP, "--engine", *names, *options])
        exit_code = bench.compare(args)
        output = capfd.readouterr()
        return exit_code, json.loads(output.out.splitlines()[-1]), output.out + output.err

    return run


def test_paths_agree_on_the_demo_checkpoint() -> None:
    paths = ["hf-sequential", "hf-groups", "adapter-transformers"]
    command = [sys.executable, str(SCRIPTS / "bench.py"), *SHORT, "--engine", *paths]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_TOKEN": "not-to-be-shown"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "not-to-be-shown" not in done.stdout
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["answers_agree"] is True
    assert [row["path"] for row in document["rows"]] == paths
    assert [row["agrees"] for row in document["rows"]] == [None, True, True]
    assert all(row["tokens"] == 12 and row["wall_seconds"] > 0 for row in document["rows"])
    assert 0 < document["rows"][2]["billed_seconds"] < document["rows"][2]["wall_seconds"]
    assert document["versions"]["transformers"] and document["machine"]["cores"]
    assert "hf-groups" in done.stdout.splitlines()[2]
    assert "9/9" in done.stderr


def test_a_planted_difference_fails_the_run(compare: Any) -> None:
    exit_code, document, output = compare(hf_sequential=answer_alike, other=answer_otherwise)
    assert exit_code == document["exit_code"] == 1
    assert document["answers_agree"] is False
    assert document["differences"][1]["prompt_index"] == 1
    assert document["differences"][1]["first_token"] == 1
    assert "'a calm song'" in output and "'a loud song'" in output
    assert "error: 3 greedy answers of other are not those of hf-sequential" in output


def test_a_difference_that_is_allowed_is_told_and_does_not_fail(compare: Any) -> None:
    exit_code, document, output = compare(
        "--allow-differences", hf_sequential=answer_alike, other=answer_otherwise
    )
    assert exit_code == 0
    assert len(document["differences"]) == 3
    assert "note: 3 greedy answers" in output


def test_a_path_that_fails_is_reported_and_the_others_run(compare: Any) -> None:
    exit_code, document, output = compare(
        broken=raise_error, dying=die, hf_sequential=answer_alike, other=answer_alike
    )
    assert exit_code == 1
    assert "broken: failed: ImportError: No module named 'vllm'" in output
    assert "the last words" in output
    assert "dying: failed: its process ended with exit code -9" in output
    assert document["paths"]["broken"]["status"] == "failed"
    assert document["answers_agree"] is True
    assert [row["path"] for row in document["rows"]] == ["hf-sequential", "other"]


def test_answers_that_nothing_was_compared_with_are_not_said_to_agree(compare: Any) -> None:
    exit_code, document, output = compare(other=answer_alike)
    assert exit_code == 0
    assert document["answers_agree"] is None
    assert document["rows"][0]["speedup"] is None
    assert "note: comparing answers takes hf-sequential and another path" in output


def test_an_answer_without_token_ids_is_compared_by_text_and_length() -> None:
    expected = Answer("a calm song", 3, (1, 2, 3))
    others = [Answer("a calm song", 3), Answer("a calm song", 4), Answer("a song", 3)]
    outcomes = {
        "hf-sequential": Outcome((Run(0, "new", 1.0, (expected,) * 3),)),
        "adapter-vllm": Outcome((Run(0, "new", 1.0, tuple(others)),)),
    }
    differences = find_differences(outcomes)
    assert [difference.prompt_index for difference in differences] == [1, 2]


def test_a_row_is_the_median_of_its_repetitions() -> None:
    answers = (Answer("a song", 10),)
    new_runs = [Run(i, "new", wall, answers, wall / 2) for i, wall in enumerate([1, 2, 6])]
    known_run = Run(0, "known", 0.5, answers, 0.25)
    outcomes = {
        "hf-sequential": Outcome((Run(0, "new", 9, answers), Run(1, "new", 8, answers))),
        "adapter-vllm": Outcome((*new_runs, known_run)),
    }
    baseline, new, known = make_rows(outcomes, [])
    assert (baseline.wall_seconds, baseline.speedup) == (8.5, 1.0)
    assert (new.wall_seconds, new.billed_seconds, new.tokens_per_second) == (2, 1, 5.0)
    assert (known.song_state, known.speedup) == ("known", 17.0)


def test_each_repetition_has_a_song_that_no_cache_knows(tmp_path: Path) -> None:
    paths = make_songs(None, 1.17, 3, tmp_path)
    first, second, third = (decode(path) for path in paths)
    assert len(first) == 17_600  # whole tenths of a second
    assert len({song.tobytes() for song in (first, second, third)}) == 3
    assert np.array_equal(first[1:], second[1:]) and np.array_equal(first[1:], third[1:])
    assert np.array_equal(read_song(paths[0]), first / np.float32(32_768))


def test_prompts_are_as_many_as_asked_and_all_different() -> None:
    prompts = make_prompts(30)
    assert len(set(prompts)) == 30
    assert make_prompts(13) == prompts[:13]


def test_secrets_stay_out_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTER_API_KEYS", "secret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert environment_of(["ADAPTER_", "TOKENIZERS_"]) == {"TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.parametrize("options", [["--prompts", "0"], ["--seconds", "nan"], ["--engine", "x"]])
def test_an_option_out_of_range_is_named(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(options)
    assert options[0] in capsys.readouterr().err


def test_a_file_that_is_no_audio_stops_the_run_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.mp3"
    path.write_text("no audio")
    assert bench.compare(bench.parse(["--song", str(path), "--model", "none"])) == 1
    assert str(path) in capsys.readouterr().err
