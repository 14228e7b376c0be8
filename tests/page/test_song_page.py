"""Choosing a song, and a part of it."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.page.driving import choose, expect_end, expect_waveform, only, open_page, start
from tests.page.fake_wire import Wire


def fields(page: Page) -> tuple[str, str]:
    return page.get_by_label("From").input_value(), page.get_by_label(
        "to", exact=True
    ).input_value()


def test_the_policy_lets_the_waveform_have_its_own_style(
    page: Page, wire: Wire, song: Path
) -> None:
    open_page(page, wire.url)
    choose(page, song)
    expect_waveform(page)
    expect(page.locator("#song-length")).to_have_text("0:12")
    # Set by the style sheet in the waveform's shadow root alone.
    position = "cursor => getComputedStyle(cursor).position"
    assert page.locator("#waveform .cursor").evaluate(position) == "absolute"


def test_a_part_is_picked_by_dragging_over_the_waveform(page: Page, wire: Wire, song: Path) -> None:
    open_page(page, wire.url)
    choose(page, song)
    expect_waveform(page)
    box = page.locator("#waveform").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 4, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=8)
    page.mouse.up()
    assert page.get_by_label("From").input_value() == "0:03"

    only(page, "Mood", "Lyrics")
    start(page)
    expect_end(page)
    [asked] = wire.asked
    assert asked.path == "/generate_batch"
    part = {"start_seconds": 3, "end_seconds": pytest.approx(6, abs=0.2)}
    prompts = [{"preset": name, **part} for name in ("mood_tags", "lyric_transcription")]
    assert asked.request == {"prompts": prompts, "stream": True}
    expect(page.get_by_role("article")).to_have_count(2)

    page.get_by_role("button", name="Whole song").click()
    assert fields(page) == ("", "")
    expect(page.locator("#waveform [part*=region-handle]")).to_have_count(0)


def test_the_song_is_played_and_paused(page: Page, wire: Wire, song: Path) -> None:
    open_page(page, wire.url)
    choose(page, song)
    expect_waveform(page)
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_a_part_that_is_typed_is_marked_on_the_waveform(page: Page, wire: Wire, song: Path) -> None:
    open_page(page, wire.url)
    choose(page, song)
    expect_waveform(page)
    page.get_by_label("From").fill("0:06")
    region = page.locator("#waveform [part^='region region-']")
    expect(region).to_have_count(1)
    box, whole = region.bounding_box(), page.locator("#waveform").bounding_box()
    assert box is not None and whole is not None
    assert box["width"] == pytest.approx(whole["width"] / 2, abs=2)
    assert fields(page) == ("0:06", "")


@pytest.mark.parametrize(
    ("start_text", "end_text", "message"),
    [("soon", "", "A time looks like"), ("5", "4", "has to end after it starts")],
)
def test_a_part_that_is_none_is_not_sent(
    page: Page, wire: Wire, song: Path, start_text: str, end_text: str, message: str
) -> None:
    open_page(page, wire.url)
    choose(page, song)
    page.get_by_label("From").fill(start_text)
    page.get_by_label("to", exact=True).fill(end_text)
    start(page)
    expect(page.get_by_role("alert")).to_contain_text(message)
    expect(page.locator("[aria-invalid=true]")).to_be_focused()
    assert wire.asked == []


def test_a_url_is_sent_as_it_is_and_has_no_waveform(page: Page, wire: Wire) -> None:
    open_page(page, wire.url)
    url = "https://example.com/a%20song.mp3?c=1"
    page.get_by_label("or paste its address").fill(url)
    page.get_by_label("From").fill("1:15.5")
    only(page, "Mood")
    start(page)
    expect_end(page)
    [asked] = wire.asked
    prompt = {"preset": "mood_tags", "start_seconds": 75.5}
    assert asked.request == {"audio_url": url, "prompts": [prompt], "stream": True}
    assert asked.num_file_bytes is None
    expect(page.locator("#waveform")).to_be_hidden()
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Markdown").click()
    assert downloading.value.suggested_filename == "a song-report.md"


def test_without_a_song_or_a_section_nothing_is_asked(page: Page, wire: Wire, song: Path) -> None:
    open_page(page, wire.url)
    start(page)
    expect(page.get_by_role("alert")).to_have_text("Choose a song first.")
    choose(page, song)
    only(page)
    start(page)
    expect(page.get_by_role("alert")).to_have_text("Choose at least one section.")
    assert wire.asked == []


def test_a_file_that_the_browser_cannot_play_is_asked_about_all_the_same(
    page: Page, wire: Wire, tmp_path: Path
) -> None:
    song = tmp_path / "song.wma"
    song.write_bytes(b"no browser plays this" * 99)
    open_page(page, wire.url)
    choose(page, song)
    expect(page.locator("#waveform-note")).to_contain_text("there is no waveform")
    start(page)
    expect_end(page)
    assert wire.asked[0].num_file_bytes == song.stat().st_size


def test_another_song_takes_the_place_of_the_first(page: Page, wire: Wire, song: Path) -> None:
    open_page(page, wire.url)
    choose(page, song)
    expect_waveform(page)
    page.get_by_label("From").fill("0:06")
    page.get_by_role("button", name="Other song").click()
    expect(page.get_by_label("Choose a song")).to_be_focused()
    choose(page, song)
    expect_waveform(page)
    assert fields(page) == ("", "")
    expect(page.locator("#waveform > *")).to_have_count(1)
