"""A browser, the page in it, and a scripted server behind it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from tests.page.fake_wire import Wire, running_wire
from tests.songs import encode, melody

CHROMIUM = "/usr/bin/chromium"
SLOWEST_STEP_MILLISECONDS = 10_000

# What the browser itself says of a status above 399, which some tests want.
EXPECTED_CONSOLE = "Failed to load resource"


# Of a module, since asyncio runs nothing else in this thread while Playwright does.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, reduced_motion="reduce", accept_downloads=True
    )
    context.set_default_timeout(SLOWEST_STEP_MILLISECONDS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page without an address yet; a violated policy or an error in a script fails its test."""
    page = context.new_page()
    faults: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        if message.type == "error" and EXPECTED_CONSOLE not in message.text:
            faults.append(message.text)

    page.on("console", listen)
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    assert faults == []


@pytest.fixture(scope="module")
def running() -> Iterator[Wire]:
    yield from running_wire(Wire())


@pytest.fixture
def wire(running: Wire) -> Wire:
    """A scripted server that has been asked nothing yet."""
    for name, value in vars(Wire(url=running.url)).items():
        if name != "num_open":
            setattr(running, name, value)
    return running


@pytest.fixture(scope="session")
def song(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A song of 12 seconds."""
    path = tmp_path_factory.mktemp("songs") / "my song.flac"
    path.write_bytes(encode(melody(12, 44_100), "flac"))
    return path
