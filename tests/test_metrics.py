"""`/metrics`: both sides of the bill, and what else an operator watches."""

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families

from adapter.logs import RequestRecord
from adapter.metrics import EngineReading, Metrics, outcome_of
from tests.fakes import FakeEngine
from tests.songs import encode, melody
from tests.test_api import client

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

DOCUMENT = Path(__file__).parents[1] / "docs" / "metrics.md"


def samples(text: str) -> Samples:
    """Every sample by its name and its labels."""
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def total(found: Samples, name: str) -> float:
    return sum(value for (sample_name, _), value in found.items() if sample_name == name)


async def scrape(http: httpx.AsyncClient) -> Samples:
    response = await http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(response.text)


def own(metrics: Metrics) -> Samples:
    return samples(metrics.expose("")[0].decode())


async def test_billed_seconds_over_all_outcomes_are_the_busy_seconds(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.01)
    async with client(random_model, engine) as http:
        batch = {"prompts": [{"max_new_tokens": n} for n in (1, 3, 7)]}
        answers = await asyncio.gather(*(http.post("/generate_batch", json=batch) for _ in "abc"))
        found = await scrape(http)
    billed = total(found, "adapter_billed_seconds_total")
    assert billed == pytest.approx(total(found, "adapter_engine_busy_seconds_total"), abs=1e-9)
    assert billed == pytest.approx(sum(a.json()["elapsed_seconds"] for a in answers), abs=1e-9)
    assert billed > 0.05


async def test_what_was_cut_off_by_deadline_or_client_is_in_the_sum(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.05)
    batch = {"prompts": [{"max_new_tokens": 2}, {"max_new_tokens": 2000}]}
    async with client(random_model, engine, request_timeout_seconds="1") as http:
        await http.post("/generate_batch", json=batch)
        await http.post("/generate", json={"max_new_tokens": 2000})
        leaving = asyncio.create_task(http.post("/generate", json={"max_new_tokens": 2000}))
        await asyncio.sleep(0.5)
        leaving.cancel()
        await asyncio.wait([leaving])
        found = await scrape(http)
    billed = total(found, "adapter_billed_seconds_total")
    assert billed == pytest.approx(total(found, "adapter_engine_busy_seconds_total"), abs=1e-9)
    prompts = {
        outcome: found["adapter_prompts_total", (("outcome", outcome),)]
        for outcome in ("answered", "failed", "aborted", "deadline_exceeded")
    }
    assert prompts == {"answered": 1, "failed": 0, "aborted": 1, "deadline_exceeded": 2}


async def test_requests_count_by_route_and_status_never_by_path(random_model: Path) -> None:
    async with client(random_model, FakeEngine(continuous=True)) as http:
        await http.post("/generate", json={})
        await http.post("/generate", json={"top_p": 7})
        await http.post("/generate_batch", json={"prompts": [{}, {}]})
        for name in ("a", "b"):
            await http.get(f"/no/{name}")
        found = await scrape(http)
    for route, status, count in (
        ("/generate", "200", 1),
        ("/generate", "422", 1),
        ("/generate_batch", "200", 1),
        ("other", "404", 2),
    ):
        labels = (("route", route), ("status", status))
        assert found["adapter_requests_total", labels] == count
    assert found["adapter_request_seconds_count", (("route", "/generate"),)] == 2
    assert found["adapter_errors_total", (("code", "not_found"),)] == 2
    assert found["adapter_queue_seconds_count", ()] == 3


async def test_an_error_within_a_batch_counts_by_its_code(random_model: Path) -> None:
    body = {"prompts": [{}, {"start_seconds": 5, "audio": "bm8gYXVkaW8="}]}
    async with client(random_model, FakeEngine(continuous=True)) as http:
        response = await http.post("/generate_batch", json=body)
        found = await scrape(http)
    code = response.json()["answers"][1]["error"]["code"]
    assert found["adapter_errors_total", (("code", code),)] == 1


async def test_the_song_counts_once_and_what_each_prompt_heard(random_model: Path) -> None:
    song = encode(melody(4.0), "wav-16")
    request = '{"prompts": [{"end_seconds": 1}, {"start_seconds": 2}]}'
    async with client(random_model, FakeEngine(continuous=True)) as http:
        files = {"request": (None, request), "audio": ("song.wav", song)}
        response = await http.post("/generate_batch", files=files)
        found = await scrape(http)
    assert response.status_code == 200, response.text
    assert total(found, "adapter_audio_seconds_total") == pytest.approx(4.0, abs=0.01)
    assert total(found, "adapter_heard_seconds_total") == pytest.approx(3.0, abs=0.01)


async def test_while_prompts_are_inside_they_run_and_the_rest_wait(random_model: Path) -> None:
    engine = FakeEngine(continuous=True, step_seconds=0.05)
    async with client(random_model, engine, max_num_seqs="2") as http:
        body = {"prompts": [{"max_new_tokens": 10}] * 5}
        asking = asyncio.create_task(http.post("/generate_batch", json=body))
        await asyncio.sleep(0.25)
        busy = await scrape(http)
        await asking
        idle = await scrape(http)
    assert total(busy, "adapter_num_requests_running") == 2
    assert total(busy, "adapter_num_requests_waiting") == 3
    assert total(idle, "adapter_num_requests_running") == 0
    assert total(idle, "adapter_num_requests_waiting") == 0


def test_two_applications_count_apart() -> None:
    first, second = (Metrics(EngineReading) for _ in "ab")
    first.error_told("failed")
    assert total(own(first), "adapter_errors_total") == 1
    assert total(own(second), "adapter_errors_total") == 0


def test_every_outcome_starts_at_zero_so_that_its_rate_is_known() -> None:
    found = own(Metrics(EngineReading))
    for outcome in ("answered", "failed", "aborted", "deadline_exceeded"):
        assert found["adapter_billed_seconds_total", (("outcome", outcome),)] == 0


def test_seconds_are_written_with_every_digit() -> None:
    reading = EngineReading(busy_seconds=1234567.1234567)
    metrics = Metrics(lambda: reading)
    metrics.prompt_ended("answered", elapsed_seconds=1234567.1234567, cost_usd=0)
    found = own(metrics)
    assert total(found, "adapter_engine_busy_seconds_total") == 1234567.1234567
    assert total(found, "adapter_billed_seconds_total") == 1234567.1234567


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_vllms_own_numbers_stand_beside_ours_where_it_is_the_engine(engine: str) -> None:
    gauge = Gauge("vllm:test_requests", "As vLLM registers its own")
    try:
        gauge.set(3)
        found = own(Metrics(lambda: EngineReading(engine=engine, model="m")))
    finally:
        REGISTRY.unregister(gauge)
    assert (("vllm:test_requests", ()) in found) == (engine == "vllm")
    assert found["adapter_engine_info", (("engine", engine), ("model", "m"))] == 1
    assert sum(name == "process_cpu_seconds_total" for name, _ in found) == 1
    assert not any(name.startswith("python_") for name, _ in found)


def test_a_scraper_that_asks_for_openmetrics_gets_it() -> None:
    text, content_type = Metrics(EngineReading).expose("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        ("stop", "answered"),
        ("length", "answered"),
        ("repetition", "answered"),
        ("aborted", "aborted"),
        ("deadline_exceeded", "deadline_exceeded"),
        ("engine_crashed", "failed"),
        ("not_audio", "failed"),
    ],
)
def test_an_outcome_is_read_from_how_the_prompt_ended(ended: str, outcome: str) -> None:
    assert outcome_of(ended) == outcome


def test_the_page_lists_every_name_and_no_other() -> None:
    metrics = Metrics(lambda: EngineReading(engine="transformers", model="m"))
    metrics.error_told("failed")
    metrics.request_ended(RequestRecord("id"))
    metrics.prompt_ended("answered", elapsed_seconds=0, cost_usd=0, queue_seconds=0)
    shown = {
        re.sub("_(bucket|sum|count|created)$", "", name)
        for name, _ in own(metrics)
        if name.startswith("adapter_")
    }
    shown -= {name.removesuffix("_total") for name in shown if name.endswith("_total")}
    listed = re.findall(r"^\| `(adapter_\w+)", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(listed)
