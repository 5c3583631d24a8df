"""The pages that people write stay short enough to be read."""

from __future__ import annotations

from support.pages import PAGES

MOST_WORDS = 22_900  # of the README and docs, as `wc -w` counts; generated pages do not count
GENERATED = "<!-- generated"


def test_the_readme_and_the_pages_are_short() -> None:
    texts = {page: page.read_text() for page in PAGES}
    words = {page: len(t.split()) for page, t in texts.items() if not t.startswith(GENERATED)}
    longest = sorted(words, key=lambda page: -words[page])[:5]
    assert sum(words.values()) <= MOST_WORDS, [(page.name, words[page]) for page in longest]
