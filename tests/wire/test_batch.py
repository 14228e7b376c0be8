"""POST /generate_batch: many prompts about a real song, in order, each billed its share."""

import itertools
import math
from typing import Any

import pytest

from tests.reference import Reference
from tests.server import Server
from tests.wire.audio import as_base64, song

QUESTIONS = [f"Question {index}: what happens in part {index}?" for index in range(13)]


def prompts(count: int = 13) -> list[dict[str, Any]]:
    """Greedy and sampled prompts with different caps."""
    drawn = itertools.cycle([{}, {}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}])
    caps = itertools.cycle([4, 12, 20, 7])
    return [
        {"prompt": question, "max_new_tokens": cap, **sampling}
        for question, cap, sampling in zip(QUESTIONS[:count], caps, drawn, strict=False)
    ]


@pytest.fixture(scope="module")
def batch(server: Server, real_song_base64: str) -> dict[str, Any]:
    """The answers to 13 prompts about a real song of five minutes."""
    response = server.post("/generate_batch", {"audio": real_song_base64, "prompts": prompts()})
    assert response.status_code == 200
    return dict(response.json())


def test_thirteen_prompts_get_thirteen_answers_in_order(
    server: Server, batch: dict[str, Any], real_song_base64: str
) -> None:
    assert len(batch["answers"]) == 13
    alone = server.post(
        "/generate_batch", {"audio": real_song_base64, "prompts": [prompts()[9]]}
    ).json()
    assert batch["answers"][9]["response"] == alone["answers"][0]["response"]
    assert len({answer["response"] for answer in batch["answers"]}) > 6


def test_every_answer_keeps_its_own_cap(batch: dict[str, Any]) -> None:
    for prompt, answer in zip(prompts(), batch["answers"], strict=True):
        assert 1 <= answer["usage"]["completion_tokens"] <= prompt["max_new_tokens"]


def test_an_answer_that_was_cut_says_length_and_one_that_ended_says_stop(server: Server) -> None:
    caps = [2, 64, 3, 64]
    asked = [{"prompt": q, "max_new_tokens": cap} for q, cap in zip(QUESTIONS, caps, strict=False)]
    answers = server.post("/generate_batch", {"prompts": asked}).json()["answers"]
    for cap, answer in zip(caps, answers, strict=True):
        at_cap = answer["usage"]["completion_tokens"] == cap
        assert answer["finish_reason"] == ("length" if at_cap else "stop")
    assert {answer["finish_reason"] for answer in answers} == {"length", "stop"}


def test_the_song_is_heard_whole(batch: dict[str, Any]) -> None:
    for answer in batch["answers"]:
        assert answer["audio"]["duration_seconds"] > 200
        assert answer["audio"]["heard_seconds"] == pytest.approx(
            answer["audio"]["duration_seconds"], abs=0.03
        )


def test_the_song_is_loaded_once(batch: dict[str, Any]) -> None:
    seconds = [answer["timings"]["audio_seconds"] for answer in batch["answers"]]
    assert sum(second > 0 for second in seconds) == 1


def test_twelve_prompts_find_the_song_in_the_prefix_cache(
    server: Server, batch: dict[str, Any]
) -> None:
    usages = [answer["usage"] for answer in batch["answers"]]
    cached = [use["cached_tokens"] > 0.9 * use["audio_tokens"] for use in usages]
    assert sum(cached) >= (12 if server.engine == "vllm" else 0)


def test_totals_are_the_sums_of_the_answers(batch: dict[str, Any]) -> None:
    for total in ("elapsed_seconds", "cost_usd"):
        assert batch[total] == pytest.approx(
            math.fsum(answer[total] for answer in batch["answers"]), abs=1e-9
        )


def test_the_billed_seconds_are_no_more_than_the_wall_and_most_of_it(
    batch: dict[str, Any],
) -> None:
    wall_seconds = batch["timings"]["wall_seconds"]
    assert batch["elapsed_seconds"] <= wall_seconds
    assert batch["elapsed_seconds"] > 0.5 * (wall_seconds - batch["timings"]["audio_seconds"])


def test_greedy_answers_equal_hugging_faces_one_at_a_time(
    server: Server, reference: Reference
) -> None:
    samples = song(31)
    asked = [prompt for prompt in prompts(8) if not prompt.get("do_sample")]
    answers = server.post(
        "/generate_batch", {"audio": as_base64(samples), "prompts": asked}
    ).json()["answers"]
    for prompt, answer in zip(asked, answers, strict=True):
        expected = reference.answer(samples, prompt["prompt"], prompt["max_new_tokens"])
        assert answer["response"] == reference.processor.tokenizer.decode(
            expected.token_ids, skip_special_tokens=True
        )


def test_prompts_may_bring_songs_of_their_own_or_none(server: Server, reference: Reference) -> None:
    shared, own = song(20, seed=1), song(45, seed=2)
    asked: list[dict[str, Any]] = [
        {"prompt": QUESTIONS[0], "max_new_tokens": 12},
        {"prompt": QUESTIONS[1], "max_new_tokens": 12, "audio": as_base64(own)},
        {"prompt": QUESTIONS[2], "max_new_tokens": 12, "start_seconds": 3, "end_seconds": 9},
    ]
    answers = server.post("/generate_batch", {"audio": as_base64(shared), "prompts": asked}).json()[
        "answers"
    ]
    heard = [shared, own, shared[3 * 16_000 : 9 * 16_000]]
    for prompt, samples, answer in zip(asked, heard, answers, strict=True):
        expected = reference.answer(samples, prompt["prompt"], 12)
        assert answer["response"] == reference.processor.tokenizer.decode(
            expected.token_ids, skip_special_tokens=True
        )


def test_prompts_with_and_without_songs_share_a_batch(server: Server) -> None:
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 3},
        {"max_new_tokens": 3, "audio": as_base64(song(2))},
    ]
    answers = server.post("/generate_batch", {"prompts": asked}).json()["answers"]
    assert [answer["usage"]["audio_tokens"] for answer in answers] == [0, 50]


@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_group_size_changes_no_greedy_answer(server: Server, group_size: int) -> None:
    body = {"audio": as_base64(song(10)), "prompts": [{"prompt": q} for q in QUESTIONS[:5]]}
    for prompt in body["prompts"]:
        prompt["max_new_tokens"] = 8  # type: ignore[index]
    free = server.post("/generate_batch", body).json()
    grouped = server.post("/generate_batch", {**body, "group_size": group_size}).json()
    texts = [[answer["response"] for answer in one["answers"]] for one in (free, grouped)]
    assert texts[0] == texts[1]


def test_one_prompts_fault_leaves_the_others_standing(server: Server) -> None:
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 3},
        {"max_new_tokens": 3, "start_seconds": 99},
        {"max_new_tokens": 3, "audio": "bm8gYXVkaW8gYXQgYWxs"},
        {"max_new_tokens": 3, "prompt": "word " * 400},
    ]
    response = server.post("/generate_batch", {"audio": as_base64(song(5)), "prompts": asked})
    assert response.status_code == 200
    answers = response.json()["answers"]
    assert [answer["error"] is None for answer in answers] == [True, False, False, True]
    assert answers[1]["error"]["code"] == "moment_outside_song"
    assert answers[1]["error"]["field"] == "prompts.1.start_seconds"
    assert answers[2]["error"]["field"] == "prompts.2.audio"
    for failed in answers[1:3]:
        assert failed["response"] == "" and failed["finish_reason"] is None
        assert failed["elapsed_seconds"] == 0
