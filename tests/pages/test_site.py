"""The site that `make docs` builds, in a browser: navigation, search, dark and light, two widths.

The `page` fixture fails each test whose page asks another host for anything or writes an error.
"""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
PICTURED = {
    "home": "",
    "howto": "howto/resume/",
    "api": "reference/api/manager/",
    "options": "reference/options/",
    "performance": "reference/performance/",
    "diagram": "explain/commit/",
}
# What reaches beyond the window's edge, and in nothing that scrolls or hides it.
WIDE = """() => {
    const edge = document.documentElement.clientWidth;
    const isHeld = (one) => {
        for (let at = one.parentElement; at && at !== document.body; at = at.parentElement)
            if (getComputedStyle(at).overflowX !== "visible") return true;
        return false;
    };
    const wide = [...document.querySelectorAll(".md-container *, .md-header *")].filter((one) =>
        one.offsetParent && one.getBoundingClientRect().right > edge + 1 && !isHeld(one));
    const more = document.documentElement.scrollWidth > edge ? ["the page scrolls"] : [];
    return [...more, ...wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 200))];
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The URL of the site, served by this process."""
    assert (SITE / "index.html").is_file(), "`make docs` builds the site"
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def links_of_navigation(page: Any, site: str) -> list[str]:
    """Returns the URL of each page of the navigation, in its order."""
    page.goto(site)
    found = page.eval_on_selector_all(
        ".md-nav--primary a.md-nav__link", "all => all.map((one) => one.href.split('#')[0])"
    )
    return list(dict.fromkeys(found))


def test_every_page_of_the_navigation_opens_and_fits(page: Any, site: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    links = links_of_navigation(page, site)
    assert len(links) > 60
    wrong: dict[str, Any] = {}
    for link in links:
        answer = page.goto(link)
        headings = page.locator("article h1").count()
        wide = page.evaluate(WIDE)
        if answer.status != 200 or headings != 1 or wide:
            wrong[link] = (answer.status, headings, wide)
    assert wrong == {}


def test_every_link_and_picture_of_a_page_is_there(page: Any, site: str) -> None:
    missing = []
    seen: dict[str, int] = {}
    for link in links_of_navigation(page, site):
        page.goto(link)
        targets = page.evaluate(
            """() => [...document.querySelectorAll("article a[href], article img[src]")]
                .map((one) => one.href || one.src)"""
        )
        for target in {each.split("#")[0] for each in targets if each.startswith(site)}:
            if target not in seen:
                seen[target] = page.request.get(target).status
            if seen[target] != 200:
                missing.append((link, target))
    assert missing == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("resume", "howto/resume/"), ("CheckpointManager", "reference/api/"), ("NVMe", "howto/")],
)
def test_search_finds_the_page_among_the_first_three(
    page: Any, site: str, words: str, wanted: str
) -> None:
    page.goto(site)
    page.locator(".md-search__input").click()
    meta = "document.querySelector('.md-search-result__meta').textContent"
    page.wait_for_function(f"() => !{meta}.includes('Initializing')")  # words before are lost
    page.locator(".md-search__input").press_sequentially(words)  # it looks at keys alone
    page.locator(".md-search-result__item").first.wait_for()
    found = page.eval_on_selector_all(
        ".md-search-result__item > a", "all => all.slice(0, 3).map((one) => one.href)"
    )
    assert any(link.startswith(site + wanted) for link in found), found


def test_the_switch_turns_dark_and_stays_so(page: Any, site: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(site)
    assert scheme_of(page) == "default"
    page.locator(".md-header__option label:visible").click()
    assert scheme_of(page) == "slate"
    page.goto(f"{site}howto/resume/")
    assert scheme_of(page) == "slate"


def scheme_of(page: Any) -> str:
    return str(page.locator("body").get_attribute("data-md-color-scheme"))


def test_diagrams_are_drawn_by_the_site_itself(page: Any, site: str) -> None:
    sources = [
        path.parent.relative_to(SITE).as_posix()
        for path in SITE.rglob("index.html")
        if 'class="mermaid"' in path.read_text()
    ]
    assert "explain/commit" in sources
    for source in sources:
        page.goto(f"{site}{source}/")
        page.wait_for_function("() => !document.querySelector('pre.mermaid')")
        heights = page.eval_on_selector_all(
            "div.mermaid", "all => all.map((one) => one.getBoundingClientRect().height)"
        )
        assert heights and min(heights) > 60, (source, heights)


def test_heads_of_arrows_have_a_colour_of_the_dark_theme(page: Any, site: str) -> None:
    page.emulate_media(color_scheme="dark")
    page.add_init_script("""
        const attach = Element.prototype.attachShadow;
        Element.prototype.attachShadow = function () {
            return attach.call(this, { mode: "open" });
        };
    """)
    for source in ("commit", "memory"):  # messages in turn, boxes with arrows
        page.goto(f"{site}explain/{source}/")
        page.wait_for_function("() => !document.querySelector('pre.mermaid')")
        fills = page.evaluate("""() => {
            const { shadowRoot } = document.querySelector("div.mermaid");
            const drawn = [...shadowRoot.querySelectorAll("[marker-end]")];
            const ids = drawn.map((one) => one.getAttribute("marker-end").slice(5, -1));
            return [...new Set(ids)].map((id) => getComputedStyle(
                shadowRoot.querySelector(`[id="${id}"] path`)).fill);
        }""")
        assert fills and "rgb(51, 51, 51)" not in fills, (source, fills)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_of_key_pages(
    page: Any, site: str, width: int, scheme: str, screenshots: Path
) -> None:
    """Leaves them for people to look at; holds only that there is something on each."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    for name, path in PICTURED.items():
        page.goto(site + path)
        if name == "diagram":
            page.wait_for_function("() => !document.querySelector('pre.mermaid')")
        picture = screenshots / f"site-{name}-{width}-{scheme}.png"
        page.screenshot(path=str(picture))
        assert picture.stat().st_size > 10_000
