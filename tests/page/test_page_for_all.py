"""By keyboard, with a screen reader, on a phone, in the dark, without motion."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.driving import choose, expect_end, expect_waveform, make_report, open_page, start
from tests.page.fake_wire import Hold, Wire, delta, done, failure, whole_report

AXE = (Path(__file__).parent / "axe.min.js").read_text()
RULES = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}"


def complaints(page: Page) -> list[str]:
    """What axe finds, of any weight."""
    page.evaluate(AXE)
    result: dict[str, Any] = page.evaluate(f"() => axe.run({RULES})")
    return [
        f"{violation['id']} ({violation['impact']}): {node['target']} {node['failureSummary']}"
        for violation in result["violations"]
        for node in violation["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(
    page: Page, wire: Wire, song: Path, scheme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=scheme)
    open_page(page, wire.url)
    assert complaints(page) == [], "before a song is chosen"

    hold = Hold()
    failed = failure(1, "incomplete_json", "it was cut", response='{"a')
    wire.script = lambda _: [delta(0, "a draft"), failed, hold, done(13)]
    choose(page, song)
    expect_waveform(page)
    start(page)
    expect(page.get_by_text("it was cut")).to_be_visible()
    page.locator("summary").evaluate_all("all => all.forEach((one) => one.click())")
    assert complaints(page) == [], "while it is written"
    hold.release()
    expect_end(page)

    wire.script = whole_report
    start(page)
    expect_end(page)
    assert complaints(page) == [], "when it is finished"


def test_dark_is_dark(page: Page, wire: Wire) -> None:
    page.emulate_media(color_scheme="dark")
    open_page(page, wire.url)
    color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert all(int(part) < 64 for part in color.removeprefix("rgb(").rstrip(")").split(","))


@pytest.fixture
def phone(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    yield context.new_page()
    context.close()


def test_a_phone_scrolls_only_up_and_down(phone: Page, wire: Wire, song: Path) -> None:
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    open_page(phone, wire.url)
    assert phone.evaluate(overflow) == 0
    choose(phone, song)
    expect_waveform(phone)
    start(phone)
    expect_end(phone)
    phone.locator("summary").evaluate_all("all => all.forEach((one) => one.click())")
    assert phone.evaluate(overflow) == 0


def test_on_a_phone_a_run_that_starts_is_in_view(phone: Page, wire: Wire, song: Path) -> None:
    hold = Hold()
    wire.script = lambda _: [delta(0, "a draft"), hold]
    open_page(phone, wire.url)
    choose(phone, song)
    start(phone)
    title = phone.get_by_role("heading", name="Report", exact=True).bounding_box()
    assert title is not None and 0 <= title["y"] < 100
    hold.release()


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element with this name or text has the focus."""
    named = "(document.activeElement.labels?.[0] ?? document.activeElement).textContent"
    for _ in range(60):
        page.keyboard.press("Tab")
        text = page.evaluate(f"document.activeElement === document.body ? '' : {named}")
        if name in text:
            return
    raise AssertionError(f"Tab never comes to {name!r}")


def test_all_is_done_by_keyboard(page: Page, wire: Wire, song: Path) -> None:
    hold = Hold()
    wire.script = lambda asked: [*whole_report(asked), hold]
    open_page(page, wire.url)
    tab_to(page, "Choose a song")
    with page.expect_file_chooser() as choosing:
        page.keyboard.press("Space")
    choosing.value.set_files(song)
    expect_waveform(page)
    tab_to(page, "From")
    page.keyboard.type("0:02")
    tab_to(page, "None")
    page.keyboard.press("Enter")
    tab_to(page, "Mood")
    page.keyboard.press("Space")
    tab_to(page, "Make report")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    expect(page.get_by_text("1 of 1 answer")).to_be_visible()
    page.keyboard.press("Enter")
    expect_end(page)
    expect(page.get_by_role("heading", name="Report", exact=True)).to_be_focused()
    tab_to(page, "Markdown")
    with page.expect_download():
        page.keyboard.press("Enter")
    prompt = {"preset": "mood_tags", "start_seconds": 2}
    assert wire.asked[0].request == {"prompts": [prompt], "stream": True}


def test_the_focus_can_be_seen_on_everything(page: Page, wire: Wire, song: Path) -> None:
    make_report(page, wire.url, song)
    page.get_by_role("heading", name="Music Flamingo").click()  # Tab goes on from there
    outline = """() => {
      const element = document.activeElement;
      const shown = [element, element.closest("label"), element.closest(".drop")];
      const widths = shown.map((one) => one && getComputedStyle(one).outlineStyle !== "none");
      return [element.tagName, widths.some(Boolean)];
    }"""
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        tag, is_visible = page.evaluate(outline)
        if tag == "BODY":
            break
        seen.append(tag)
        assert is_visible, f"the {tag} after {seen}"
    assert {"BUTTON", "INPUT", "SUMMARY", "A"} <= set(seen)


def test_a_screen_reader_is_told_now_and_then(page: Page, wire: Wire, song: Path) -> None:
    open_page(page, wire.url)
    page.evaluate("""() => {
      window.told = [];
      const note = (changes) => window.told.push(changes[0].target.textContent);
      new MutationObserver(note).observe(document.getElementById("status"), { childList: true });
    }""")
    wire.script = lambda asked: whole_report(asked, pause_seconds=0.02)
    choose(page, song)
    start(page)
    expect_end(page)
    expect(page.get_by_role("status")).to_have_text("Finished.")
    assert page.evaluate("window.told") == [
        "Asked; 13 sections will fill in.",
        "4 of 13 sections finished.",
        "8 of 13 sections finished.",
        "12 of 13 sections finished.",
        "Finished.",
    ]


def test_nothing_moves_for_those_who_want_it_still(page: Page, wire: Wire, song: Path) -> None:
    hold = Hold()
    wire.script = lambda _: [delta(0, "a draft"), hold]
    open_page(page, wire.url)
    choose(page, song)
    start(page)
    expect(page.get_by_text("a draft")).to_be_visible()
    moving = "document.getAnimations().length"
    assert page.evaluate(moving) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(moving) > 0
    hold.release()
