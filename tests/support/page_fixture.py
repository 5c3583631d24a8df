"""Fixtures of tests/pages: one headless Chromium of the system, and a page in it.

`make test-pages` installs Playwright, which drives it. `page` holds what a test must not see: it
fails a test whose page has written an error to the console, or has asked for anything but files
that the test opened or serves.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (390, 1280)  # pixels: a telephone, a laptop
LONG_MS = 120_000  # no test depends on a quiet machine

_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
_LOCAL = ("file:", "data:", "blob:", "http://127.0.0.1:")  # a server of a test


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One headless Chromium for all tests of a process."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program is not None, "no chromium. On Debian: apt install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        yield started
        started.close()


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest) -> int:
    """Pixels of the window: the test runs once for each of `WIDTHS`."""
    return int(request.param)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page 1,280 pixels wide; at the end it has asked for no network and written no error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(LONG_MS)
    opened = context.new_page()
    problems: list[str] = []
    opened.on(
        "console", lambda said: said.type in ("error", "warning") and problems.append(said.text)
    )
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "request",
        lambda asked: asked.url.startswith(_LOCAL) or problems.append(f"asked for {asked.url}"),
    )
    yield opened
    context.close()
    assert problems == []


@pytest.fixture
def screenshots() -> Path:
    """The folder where tests leave pictures for people to look at."""
    folder = ROOT / "build" / "pages"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def overflow_of(page: Any) -> list[str]:
    """Returns the elements that reach beyond the right edge of the window, a few of them."""
    found: list[str] = page.evaluate("""() => {
        const edge = document.documentElement.clientWidth;
        const inScroll = (one) => one.closest(".scroll") && !one.classList.contains("scroll");
        const wide = [...document.querySelectorAll("body *")].filter(
            (one) => !inScroll(one) && one.getBoundingClientRect().right > edge + 1);
        const more = document.documentElement.scrollWidth > edge ? ["the page scrolls"] : [];
        return [...more, ...wide.slice(0, 5).map((one) => one.outerHTML.slice(0, 120))];
    }""")
    return found
