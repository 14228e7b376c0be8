"""From a song in the browser to the engine and back: nothing here is scripted."""

import time

import pytest
from playwright.sync_api import Page, expect

from tests.page.driving import drop, open_page, start
from tests.server import Server
from tests.songs import real_song

REPORT_SECONDS = 400
WAVEFORM_SECONDS = 60


def num_running(server: Server) -> float:
    """Prompts that are in the engine."""
    lines = server.get("/metrics").text.splitlines()
    return next(
        float(line.split()[-1]) for line in lines if line.startswith("adapter_num_requests_running")
    )


def watch_report(page: Page) -> list[int]:
    """How many sections were finished, each time that it was another number."""
    seen: list[int] = []
    deadline = time.monotonic() + REPORT_SECONDS
    while page.locator("#cancel").is_visible():
        assert time.monotonic() < deadline
        num_finished = page.get_by_role("progressbar").evaluate("bar => bar.value")
        if num_finished not in seen:
            seen.append(num_finished)
        page.wait_for_timeout(50)
    return seen


@pytest.mark.vllm_only  # to be quick
@pytest.mark.timeout(900)
def test_a_real_song_becomes_a_report_and_a_second_run_is_cancelled(
    page: Page, server: Server
) -> None:
    open_page(page, server.url + "/")
    drop(page, real_song())
    page.locator("#play:enabled").wait_for(timeout=WAVEFORM_SECONDS * 1000)
    start(page)
    expect(page.get_by_role("article")).to_have_count(13)
    seen = watch_report(page)

    assert page.get_by_role("alert").inner_text() == ""
    assert seen == sorted(seen) and len(seen) > 3, "sections arrive one after the other"
    states = page.get_by_role("article").evaluate_all("all => all.map((one) => one.dataset.state)")
    assert len(states) == 13 and set(states) <= {"done", "failed"}, "failed: cut before its end"
    expect(page.locator("#measured")).to_contain_text("LUFS")

    start(page)
    page.locator("[data-state=writing]").first.wait_for(timeout=WAVEFORM_SECONDS * 1000)
    assert num_running(server) > 0
    page.get_by_role("button", name="Cancel").click()
    cancelled_at = time.monotonic()
    while num_running(server) > 0:
        assert time.monotonic() < cancelled_at + 1
    expect(page.get_by_role("status")).to_have_text("Cancelled.")
