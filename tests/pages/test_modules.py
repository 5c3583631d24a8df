"""The treemap, and the page of `trace`: order, labels, colours with their legend, the timeline."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.page_samples import save_language_model, write_traces
from support.page_texts import opened, run, texts_of
from support.saves import save


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pages of `inspect`, of a model and of twelve layers, and of `trace`."""
    folder = tmp_path_factory.mktemp("modules")
    save_language_model(folder / "model")
    layers = {f"layers.{at}.weight": torch.ones(64, dtype=torch.bfloat16) for at in range(12)}
    save({**layers, "norm.weight": torch.ones(64), "lr": 0.25}, folder / "layers")
    with pytest.MonkeyPatch.context() as patch:
        write_traces(folder / "traces", patch)
    for name in ("model", "layers"):
        run("inspect", folder / name, "--html", folder / f"{name}.html")
    run("diff", folder / "model", folder / "layers", "--html", folder / "diff.html")
    run("trace", folder / "traces", "--out", folder / "o", "--html", folder / "trace.html")
    return folder


def test_layers_lie_and_are_listed_in_the_order_of_their_numbers(page: Any, made: Path) -> None:
    opened(page, made / "layers.html")
    places: dict[str, tuple[float, float]] = {}
    for text, x, y, _ in texts_of(page, "modules"):
        if text.endswith(".weight") and text[0].isdigit():
            places[text.split(".")[0]] = (round(y), x)
    assert sorted(places, key=places.__getitem__) == [str(at) for at in range(12)]
    page.get_by_text("The same as a list").first.click()
    page.get_by_role("button", name="layers", exact=True).click()
    rows = page.get_by_role("table", name="Inside layers").locator("tbody tr td:first-child")
    assert rows.all_inner_texts() == [f"{at}.weight" for at in range(12)]


@pytest.mark.parametrize("name", ["model", "diff"])
def test_labels_are_whole_and_within_the_drawing(
    page: Any, made: Path, width: int, name: str
) -> None:
    opened(page, made / f"{name}.html", width)
    found = texts_of(page, "modules")
    holder = page.locator(".modules").evaluate("(one) => one.clientWidth")
    assert [each for each in found if "…" in each[0]] == []
    assert [each for each in found if each[1] + each[3] > holder] == []
    lines: dict[int, list[tuple[float, float]]] = {}
    for _, x, y, wide in found:
        lines.setdefault(round(y), []).append((x, x + wide))
    for line in lines.values():  # no text lies upon another one
        line.sort()
        assert all(one[1] <= two[0] + 1 for one, two in pairwise(line)), line


@pytest.mark.parametrize("name", ["model", "layers", "diff", "trace"])
def test_nothing_is_cut_in_a_narrow_window(page: Any, made: Path, name: str) -> None:
    opened(page, made / f"{name}.html", 390)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    cut = page.evaluate("""() => [...document.querySelectorAll("main *")].filter((one) =>
        one.tagName !== "INPUT" && one.scrollWidth > one.clientWidth + 1 && one.clientWidth
        && getComputedStyle(one).overflowX !== "visible").map((one) => one.outerHTML.slice(0, 200))
    """)
    assert cut == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_colours_have_a_legend_and_are_not_those_of_ranks(page: Any, made: Path) -> None:
    opened(page, made / "model.html")
    assert page.evaluate("HUES.filter((hue) => RANKS.includes(hue))") == []
    legend = page.locator(".legend").first
    assert "optim.exp_avg" in legend.inner_text()
    page.locator("#color").select_option("dtype")
    assert "float32 2.05 MB" in legend.inner_text() and "bfloat16" in legend.inner_text()
    page.locator("#color").select_option("rank or file")
    assert "several ranks or files" in legend.inner_text()


def test_the_largest_parts_have_hues_and_the_others_one(page: Any, tmp_path: Path) -> None:
    names = "abcdefghijkl"
    save({f"{one}.w": torch.ones(1000 + 99 * at) for at, one in enumerate(names)}, tmp_path / "a")
    run("inspect", tmp_path / "a", "--html", tmp_path / "out.html")
    opened(page, tmp_path / "out.html")
    found = page.locator(".legend").first.locator("li").all_inner_texts()
    *parts, others, several = (text.split(" ")[0] for text in found)
    assert parts == [*reversed(names[-7:])]
    assert (others, several) == ("others", "a")


def test_values_were_read_or_compared_by_recorded_checksums(
    page: Any, made: Path, tmp_path: Path
) -> None:
    opened(page, made / "diff.html")
    assert "checksums" not in page.locator(".facts").inner_text()
    out = tmp_path / "quick.html"
    run("diff", made / "model", made / "layers", "--quick", "--html", out)
    opened(page, out)
    assert "the rest by recorded checksums" in page.locator(".facts").inner_text()


def test_a_font_moves_no_box_of_the_timeline(page: Any, made: Path) -> None:
    opened(page, made / "trace.html")
    whole = {text: x for text, x, *_ in texts_of(page, "timeline")}
    page.evaluate("""() => {
        const font = Object.getOwnPropertyDescriptor(CanvasRenderingContext2D.prototype, "font");
        const set = function (text) { font.set.call(this, text.replace(/12px.*/, "14px serif")); };
        Object.defineProperty(CanvasRenderingContext2D.prototype, "font", { ...font, set });
        texts.length = 0;
        document.querySelector("#rows").dispatchEvent(new Event("change"));
    }""")
    again = {text: x for text, x, *_ in texts_of(page, "timeline")}
    shared = [text for text in ("0 s", "500 ms", "rank 0, writer") if text in again]
    assert len(shared) == 3 and [whole[text] for text in shared] == [again[text] for text in shared]


def test_head_has_parameters_and_dtypes_and_the_search_how_many(page: Any, made: Path) -> None:
    opened(page, made / "layers.html")
    head = page.locator(".facts").inner_text()
    assert "parameters\n832" in head and "dtypes\nbfloat16" in head
    assert page.get_by_role("table", name="Objects").locator("tbody").inner_text().split() == [
        "lr", "0.25", "619", "B",
    ]  # fmt: skip
    page.get_by_label("Part of a name").fill("layers.1")
    page.get_by_text("3 of 14 names.").wait_for()
    page.get_by_label("Part of a name").fill("lr")
    assert page.locator(".value").inner_text() == "0.25"


def test_timeline_has_a_row_for_each_thread_and_a_click_goes_near(
    page: Any, made: Path, width: int
) -> None:
    opened(page, made / "trace.html", width)
    texts = {text for text, *_ in texts_of(page, "timeline")}
    for rank in range(4):
        for thread in ("MainThread", "writer", "writer: worker 1"):
            assert f"rank {rank}, {thread}" in texts
    assert any(text.startswith("write") for text in texts)
    whole = page.locator(".zoom span").inner_text()
    page.get_by_role("button", name="nearer").click()
    assert page.locator(".zoom span").inner_text() != whole
    page.get_by_role("button", name="show all of the time").click()
    assert page.locator(".zoom span").inner_text() == whole
    page.locator("#rows").select_option("rank 2 and its workers")
    page.get_by_text("The same as a list").click()
    rows = page.get_by_role("table", name="Boxes").locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() == 3 + 2 * 10
    assert rows.first.inner_text().startswith("rank 2, MainThread")
