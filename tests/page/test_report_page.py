"""What the page makes of a stream: sections that fill in, and all that can go wrong with them."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.responses import JSONResponse
from playwright.sync_api import Page, expect

from tests.page.driving import (
    choose,
    drop,
    expect_end,
    expect_waveform,
    make_report,
    only,
    open_page,
    section,
    start,
)
from tests.page.fake_wire import (
    PRESETS,
    RATE_USD_PER_SECOND,
    Break,
    Event,
    Hold,
    Pause,
    Step,
    Wire,
    answer,
    delta,
    done,
    failure,
    restart,
)
from tests.page.sample_report import ANSWERS, DESCRIPTION, DISPUTED, MEASURED

LABELS = {preset["report_key"]: preset["label"] for preset in PRESETS}


def wait_until(condition: Callable[[], bool], page: Page, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def test_a_dropped_song_becomes_a_report_of_all_sections(
    page: Page, wire: Wire, song: Path
) -> None:
    open_page(page, wire.url)
    drop(page, song)
    expect_waveform(page)
    start(page)
    expect_end(page)

    expect(page.get_by_role("article")).to_have_count(13)
    expect(section(page, "Description")).to_contain_text(DESCRIPTION)
    expect(section(page, "Mood")).to_contain_text("Valence71")
    expect(section(page, "Sync")).to_contain_text("Best moment1:03")
    expect(section(page, "Music theory")).to_contain_text("Form start0:000:130:40")
    [asked] = wire.asked
    assert asked.path == "/full_report"
    names = [preset["name"] for preset in PRESETS]
    assert asked.request == {"sections": names, "stream": True}
    assert asked.num_file_bytes == song.stat().st_size


def test_a_section_shows_its_text_while_it_is_written(page: Page, wire: Wire, song: Path) -> None:
    first, second = Hold(), Hold()
    steps = [delta(0, "A fl"), first, delta(0, "ute"), second, answer(0, "A flute."), done(1)]
    wire.script = lambda _: steps
    open_page(page, wire.url)
    choose(page, song)
    only(page, "Description")
    start(page)

    written = section(page, "Description")
    expect(written).to_contain_text("A fl")
    expect(written).to_have_attribute("aria-busy", "true")
    first.release()
    expect(written).to_contain_text("A flute")
    second.release()
    expect(written).to_contain_text("A flute.")
    expect(written).to_have_attribute("aria-busy", "false")


def test_progress_and_cost_grow_with_each_answer(page: Page, wire: Wire, song: Path) -> None:
    hold = Hold()
    wire.script = lambda _: [answer(1, "one"), hold, answer(0, "two"), done(2)]
    open_page(page, wire.url)
    choose(page, song)
    only(page, "Description", "Lyrics")
    start(page)
    totals = page.locator("#totals")
    expect(totals).to_contain_text("1 of 2 sections")
    expect(totals).to_contain_text("billed 1.0 s · $0.0006")
    assert page.get_by_role("progressbar").evaluate("bar => bar.value") == 1
    hold.release()
    expect(totals).to_contain_text("2 of 2 sections")
    expect(totals).to_contain_text("billed 2.0 s · $0.0012")


def test_a_restart_begins_a_section_s_text_anew(page: Page, wire: Wire, song: Path) -> None:
    hold = Hold()
    wire.script = lambda _: [delta(0, "lost words"), restart(0), delta(0, "new"), hold, done(0)]
    open_page(page, wire.url)
    choose(page, song)
    only(page, "Description")
    start(page)
    expect(section(page, "Description").locator(".draft")).to_have_text("new")
    hold.release()


def test_an_error_in_mid_stream_is_said_and_what_is_finished_stays(
    page: Page, wire: Wire, song: Path
) -> None:
    error = {"code": "engine_dead", "message": "the engine is gone", "field": None}
    wire.script = lambda _: [answer(0, "kept"), delta(1, "half"), Event("error", {"error": error})]
    open_page(page, wire.url)
    choose(page, song)
    only(page, "Description", "Lyrics")
    start(page)
    expect(page.get_by_role("alert")).to_contain_text("The engine is gone.")
    expect(section(page, "Description")).to_contain_text("kept")
    expect(section(page, "Lyrics")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Make report")).to_be_enabled()


@pytest.mark.parametrize("ending", [[], [Pause(0.2), Break()]], ids=["closed", "broken"])
def test_a_connection_that_ends_early_is_said(
    page: Page, wire: Wire, song: Path, ending: list[Step]
) -> None:
    wire.script = lambda _: [delta(0, "half"), *ending]
    open_page(page, wire.url)
    choose(page, song)
    start(page)
    expect(page.get_by_role("alert")).to_contain_text("The connection ended before")
    expect(page.get_by_role("article").first).to_contain_text("half")


def test_a_section_that_failed_says_why_and_the_others_stand(
    page: Page, wire: Wire, song: Path
) -> None:
    cut = failure(0, "incomplete_json", "it was cut", response='{"primary": "ha')
    wire.script = lambda _: [cut, answer(1, "kept"), done(2)]
    open_page(page, wire.url)
    choose(page, song)
    only(page, "Mood", "Description")
    start(page)
    expect_end(page)
    failed = section(page, "Mood")
    expect(failed).to_contain_text("no answer")
    expect(failed).to_contain_text("it was cut")
    failed.get_by_text("What was written").click()
    expect(failed.locator("pre")).to_have_text('{"primary": "ha')
    expect(section(page, "Description")).to_contain_text("kept")


def test_sections_that_the_measurement_disputes_are_marked(
    page: Page, wire: Wire, song: Path
) -> None:
    make_report(page, wire.url, song)
    for key, label in LABELS.items():
        mark = section(page, label).get_by_text("Disputed by measurement")
        expect(mark).to_have_count(1 if key in DISPUTED else 0)


def test_what_was_measured_is_shown(page: Page, wire: Wire, song: Path) -> None:
    make_report(page, wire.url, song)
    measured = page.locator("#measured")
    for text in ("5:22", "124.8 BPM", "A minor", "0.81", "-14.2 LUFS"):
        expect(measured).to_contain_text(text)


def test_the_raw_json_of_a_section_is_at_hand(page: Page, wire: Wire, song: Path) -> None:
    make_report(page, wire.url, song)
    mood = section(page, "Mood")
    mood.get_by_text("JSON", exact=True).click()
    assert json.loads(mood.locator("pre").inner_text()) == ANSWERS["mood"]


def test_cancel_closes_the_stream_and_keeps_what_is_finished(
    page: Page, wire: Wire, song: Path
) -> None:
    hold = Hold()
    wire.script = lambda _: [answer(0, "kept"), delta(1, "half"), hold]
    open_page(page, wire.url)
    choose(page, song)
    start(page)
    expect(section(page, LABELS["mood"])).to_contain_text("half")
    page.get_by_role("button", name="Cancel").click()
    expect_end(page)
    wait_until(lambda: wire.num_open == 0, page, seconds=1)
    expect(page.get_by_role("status")).to_have_text("Cancelled.")
    expect(page.get_by_role("alert")).to_be_empty()
    expect(section(page, LABELS["overview"])).to_contain_text("kept")
    expect(section(page, LABELS["mood"])).to_contain_text("stopped")
    expect(page.get_by_role("button", name="JSON")).to_be_visible()


def test_a_server_with_keys_is_asked_again_with_the_key(page: Page, wire: Wire, song: Path) -> None:
    wire.key = "a-secret"
    page.goto(wire.url)
    key = page.get_by_label("Key of this server")
    expect(key).to_be_focused()
    expect(page.get_by_role("alert")).to_have_text("This server asks for an API key.")
    key.fill("another")
    key.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("This API key is not known.")
    key.fill("a-secret")
    key.press("Enter")
    expect(page.get_by_role("checkbox")).to_have_count(13)
    expect(page.get_by_role("alert")).to_be_empty()
    assert wire.asked == []

    choose(page, song)
    start(page)
    expect_end(page)
    assert wire.asked[0].authorization == "Bearer a-secret"
    stored = "[Object.values(sessionStorage), localStorage.length, document.cookie]"
    assert page.evaluate(stored) == [["a-secret"], 0, ""]


def test_a_key_that_is_refused_in_the_middle_is_asked_for(
    page: Page, wire: Wire, song: Path
) -> None:
    open_page(page, wire.url)
    choose(page, song)
    expect(page.get_by_label("Key of this server")).to_be_hidden()
    wire.key = "a-secret"
    start(page)
    expect(page.get_by_label("Key of this server")).to_be_focused()


def test_a_server_that_is_busy_says_when_to_try_again(page: Page, wire: Wire, song: Path) -> None:
    error = {"code": "queue_full", "message": "the queue is full", "field": None}
    wire.refusal = JSONResponse({"error": error}, 503, {"Retry-After": "7"})
    open_page(page, wire.url)
    choose(page, song)
    start(page)
    expect(page.get_by_role("alert")).to_have_text("The queue is full. Try again in 7 s.")
    expect(page.get_by_role("article")).to_have_count(0)
    wire.refusal = None
    start(page)
    expect_end(page)
    expect(page.get_by_role("alert")).to_be_empty()


HOSTILE = '<img src=x onerror="window.caught = 1"><script>window.caught = 1</script>'


@pytest.mark.parametrize("stage", ["draft", "text", "data", "failure", "reasoning"])
def test_what_the_model_writes_is_never_html(
    page: Page, wire: Wire, song: Path, stage: str
) -> None:
    hold = Hold()
    steps = {
        "draft": [delta(0, HOSTILE), hold],
        "text": [answer(0, HOSTILE), done(1)],
        "data": [answer(0, {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}), done(1)],
        "failure": [failure(0, "incomplete_json", HOSTILE, HOSTILE), done(1)],
        "reasoning": [answer(0, "", reasoning=HOSTILE), done(1)],
    }
    wire.script = lambda _: steps[stage]
    open_page(page, wire.url)
    choose(page, song)
    only(page, "Description")
    start(page)
    shown = section(page, "Description")
    expect(shown).to_contain_text(HOSTILE)
    assert shown.locator("img, script").count() == 0
    assert page.evaluate("window.caught") is None
    hold.release()


def test_an_own_question_is_asked_and_answered(page: Page, wire: Wire, song: Path) -> None:
    open_page(page, wire.url)
    choose(page, song)
    page.get_by_text("Own question").click()
    page.get_by_label("Your question").fill("What plays here?")
    page.get_by_role("button", name="Ask").click()
    expect_end(page)
    expect(section(page, "What plays here?")).to_contain_text("A flute and a harp.")
    [asked] = wire.asked
    assert asked.path == "/generate"
    expected = {"prompt": "What plays here?", "stop_on_repetition": True, "stream": True}
    assert asked.request == expected


def test_the_json_is_the_report_s_own_form(page: Page, wire: Wire, song: Path) -> None:
    make_report(page, wire.url, song)
    with page.expect_download() as downloading:
        page.get_by_role("button", name="JSON").click()
    download = downloading.value
    assert download.suggested_filename == "my song-report.json"
    body = json.loads(download.path().read_text())
    assert body["report"] == ANSWERS | {"measured": MEASURED}
    assert [one["preset"] for one in body["sections"]] == [preset["name"] for preset in PRESETS]
    assert body["sections"][1]["data"] == ANSWERS["mood"]
    assert body["cost_usd"] == pytest.approx(13 * RATE_USD_PER_SECOND)
    assert body["complete"] is True


def test_the_markdown_has_every_section_and_keeps_words_words(
    page: Page, wire: Wire, song: Path
) -> None:
    wire.script = lambda _: [
        answer(0, "# no title\n<b>no tag</b> [no](link)"),
        answer(1, ANSWERS["mood"]),
        failure(2, "out_of_memory", "no room"),
        done(3, {"measured": MEASURED}),
    ]
    open_page(page, wire.url)
    choose(page, song)
    only(page, "Catalogue metadata", "Mood", "Description")
    start(page)
    expect_end(page)
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Markdown").click()
    text = downloading.value.path().read_text()
    assert downloading.value.suggested_filename == "my song-report.md"
    assert text.startswith("# my song.flac\n")
    assert "* Tempo: 124.8 BPM" in text
    assert "\\# no title  \n\\<b\\>no tag\\</b\\> \\[no\\](link)" in text
    assert "* **Tags:** light, curious, warm, nostalgic" in text
    assert "*No answer: no room*" in text


def test_it_works_below_a_prefix(page: Page, wire: Wire, song: Path) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    make_report(page, wire.url + "prefix/", song)
    expect(page.get_by_role("article")).to_have_count(13)
    ours = [url for url in asked if not url.startswith("blob:")]
    assert ours and all(url.startswith(wire.url + "prefix/") for url in ours)
