"""Words of messages: names in groups, URLs without secrets."""

from __future__ import annotations

import fnmatch
import random
import re

import pytest

from torch_dcpx._text import grouped, shown_url

LORA = [
    f"base_model.model.layers.{layer}.{part}_proj.lora_{side}.default.weight"
    for layer in range(14)
    for part in "qkvo"
    for side in "AB"
]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["w"], "`w`"),
        (["a", "b"], "`a`, `b`"),
        (["head.weight", "head.bias"], "`head.bias`, `head.weight`"),
        (list("abcdefg"), "`a`, `b`, `c` and 4 more"),
        ([f"layers.{i}.w" for i in range(300)], "300 of `layers.*.w`"),
        ([f"layers.{i}.w" for i in range(9)] + ["head"], "9 of `layers.*.w`, `head`"),
        (
            LORA,
            "56 of `base_model.model.layers.*.lora_A.default.weight`, "
            "56 of `base_model.model.layers.*.lora_B.default.weight`",
        ),
        (["x" * 500], f"`{'x' * 160}...`"),
    ],
)
def test_names_are_grouped_by_what_they_share(names: list[str], shown: str) -> None:
    assert grouped(names) == shown
    assert grouped(names[::-1]).count("`") == shown.count("`")


def test_groups_are_globs_that_fit_all_their_names() -> None:
    rng = random.Random(7)
    for _ in range(200):
        names = sorted(
            {
                ".".join(rng.choice("abc") for _ in range(rng.randint(1, 5)))
                for _ in range(rng.randint(1, 30))
            }
        )
        text = grouped(names)
        if " more" in text:
            continue
        counts = {
            glob: int(count or 1) for count, glob in re.findall(r"(?:(\d+) of )?`([^`]*)`", text)
        }
        others = re.search(r" and (\d+) others?$", text)
        left = int(others[1]) if others else 0
        assert 1 <= len(counts) <= 3 and sum(counts.values()) == len(names) - left
        fit = [any(fnmatch.fnmatchcase(name, glob) for glob in counts) for name in names]
        assert sum(fit) >= len(names) - left


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gs://bucket/run", "gs://bucket/run"),
        ("https://host:9000/run", "https://host:9000/run"),
        ("gs://bucket/a@b", "gs://bucket/a@b"),
        ("runs/a?b#c@d:e", "runs/a?b#c@d:e"),
        ("https://me:pw@host/run", "https://...@host/run"),
        ("https://me:p/w@host/run", "https://...@host/run"),
        ("https://me:p?w@host/run", "https://...@host/run"),
        ("https://me:p@w@host", "https://...@host"),
        ("https://host/run?sig=pw", "https://host/run?..."),
        ("https://host/run#pw", "https://host/run?..."),
        ("me:pw@https://host", "https://host"),
    ],
)
def test_url_is_shown_without_what_may_be_a_secret(text: str, shown: str) -> None:
    assert shown_url(text) == shown
