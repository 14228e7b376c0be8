"""What somebody does on the page."""

import base64
from pathlib import Path

from playwright.sync_api import Locator, Page

_DROP = """([name, content]) => {
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], name));
  const target = document.getElementById("drop");
  for (const type of ["dragover", "drop"]) {
    target.dispatchEvent(new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true }));
  }
}"""


def open_page(page: Page, url: str) -> None:
    """Open the page, and wait until it offers its sections."""
    page.goto(url)
    page.get_by_role("checkbox").first.wait_for()


def choose(page: Page, song: Path) -> None:
    page.get_by_label("Choose a song").set_input_files(song)


def drop(page: Page, song: Path) -> None:
    page.evaluate(_DROP, [song.name, base64.b64encode(song.read_bytes()).decode()])


def expect_waveform(page: Page) -> None:
    page.locator("#play:enabled").wait_for()


def start(page: Page) -> None:
    page.get_by_role("button", name="Make report").click()


def expect_end(page: Page, timeout_seconds: float = 10) -> None:
    page.locator("#cancel").wait_for(state="hidden", timeout=timeout_seconds * 1000)


def make_report(page: Page, url: str, song: Path) -> None:
    open_page(page, url)
    choose(page, song)
    start(page)
    expect_end(page)


def only(page: Page, *labels: str) -> None:
    """Choose these sections alone."""
    page.get_by_role("button", name="None", exact=True).click()
    for label in labels:
        page.get_by_role("checkbox", name=label).check()


def section(page: Page, label: str) -> Locator:
    return page.get_by_role("article", name=label, exact=True)
