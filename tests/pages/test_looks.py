"""What a designer would look for: contrast, focus, colours that tell, long tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.page_texts import opened, run, texts_of
from support.rank_saves import rows_of, save_ranks
from support.saves import save


def page_of(state: dict[str, Any], folder: Path) -> Path:
    save(state, folder / "a")
    run("inspect", folder / "a", "--html", folder / "out.html")
    return folder / "out.html"


def contrast(one: str, two: str) -> float:
    """Returns the contrast of two colours as WCAG counts it, 1 to 21."""

    def light(text: str) -> float:
        parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        lines = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * lines[0] + 0.7152 * lines[1] + 0.0722 * lines[2] + 0.05

    a, b = light(one), light(two)
    return max(a, b) / min(a, b)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_boxes(page: Any, tmp_path: Path, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    for name in ("a", "b"):
        save({"w": torch.ones(4) * len(name)}, tmp_path / name)
    run("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "out.html")
    opened(page, tmp_path / "out.html")
    pairs = page.evaluate("""() => {
        const ramp = [...new Array(61).keys()].map((at) => rampAt(10 ** (-at / 10)));
        const tones = [...[...RANKS, ...HUES, NO_HUE, ...KINDS.map((kind) => kind.hue)].map(fill),
            ...ramp, color("alarm"), color("equal"), color("waits")];
        return [...tones, ...tones.map((tone) => mixed(tone, color("paper"), 0.3))]
            .map((tone) => [tone, inkOn(tone)]);
    }""")
    assert [pair for pair in pairs if contrast(*pair) < 4.4] == []


def test_every_control_shows_where_the_focus_is(page: Any, tmp_path: Path) -> None:
    opened(page, page_of({f"w{at}": torch.ones(at + 1) for at in range(3)}, tmp_path))
    texts_of(page, "modules")
    seen = []
    for _ in range(8):
        page.keyboard.press("Tab")
        tag, outline = page.evaluate("""() => {
            const { localName } = document.activeElement;
            const { outlineStyle, outlineWidth } = getComputedStyle(document.activeElement);
            return [localName, `${outlineStyle} ${outlineWidth}`];
        }""")
        assert outline == "solid 2px", tag
        seen.append(tag)
    assert {"select", "summary", "input", "button"} <= {*seen}


def test_hues_are_of_what_is_large(page: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {"model.layers.0.mlp.w": torch.ones(3000)}
    for layer in range(4):
        for part, size in (("mlp", 9000), ("attn", 4000)):
            state[f"optim.state.layers.{layer}.{part}.w"] = torch.ones(size, dtype=torch.float64)
    small = {f"option_{at}": at for at in range(9)}
    opened(page, page_of({**state, **small}, tmp_path))
    found = page.locator(".legend").first.locator("li").all_inner_texts()
    first, second, *_ = (text.split(" ")[0] for text in found)
    assert (first, second) == ("optim.state.layers.*.mlp", "optim.state.layers.*.attn")
    assert "others" in [text.split(" ")[0] for text in found]
    assert not any("option_" in text for text in found)


def test_many_equal_parts_have_one_colour(page: Any, tmp_path: Path) -> None:
    opened(page, page_of({f"w{at}": torch.ones(9) for at in range(40)}, tmp_path))
    (only,) = page.locator(".legend").first.locator("li").all_inner_texts()
    assert only.startswith("all ")


def test_checkpoint_of_nothing_has_no_empty_drawing(page: Any, tmp_path: Path) -> None:
    opened(page, page_of({}, tmp_path))
    page.get_by_text("Nothing here has bytes.").wait_for()
    assert page.locator(".chart").count() == 0 and page.locator("table").count() == 0


def test_module_whose_name_does_not_fit_hides_what_is_in_it(page: Any, tmp_path: Path) -> None:
    name = "a_module_with_a_name_that_is_long_for_its_box"
    state = {f"{name}.exp_avg": torch.ones(9000), f"{name}.exp_avg_sq": torch.ones(9000)}
    opened(page, page_of({"w": torch.ones(200_000), **state}, tmp_path))
    texts = {text for text, *_ in texts_of(page, "modules")}
    assert "w" in texts and not any("exp_avg" in text for text in texts)


def test_long_table_scrolls_beneath_its_head(page: Any, tmp_path: Path) -> None:
    whole = torch.ones(64, 2)
    save_ranks([{"w": rows_of(whole, rank, 64)} for rank in range(64)], tmp_path / "a")
    run("inspect", tmp_path / "a", "--html", tmp_path / "out.html")
    opened(page, tmp_path / "out.html")
    table = page.get_by_role("region", name="Parts")
    assert table.bounding_box()["height"] <= 0.8 * 900
    table.focus()
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('.tall').scrollTop > 100")
    head, box = table.locator("th").first.bounding_box(), table.bounding_box()
    assert head["y"] == pytest.approx(box["y"], abs=1)


def test_diff_shows_what_became_nan_and_nothing_else_in_its_colour(
    page: Any, tmp_path: Path
) -> None:
    state = {f"layers.{at}.w": torch.ones(99) for at in range(4)}
    broken = torch.ones(99)
    broken[7] = math.nan
    zero = {"zero": torch.zeros(99)}  # whose relative change is infinite, and no fault
    save({**state, **zero}, tmp_path / "a")
    save({**state, "layers.2.w": broken, "zero": torch.ones(99)}, tmp_path / "b")
    run("diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "out.html")
    opened(page, tmp_path / "out.html")
    texts = {text for text, *_ in texts_of(page, "modules")}
    assert {"≠ 2.w", "NaN or ∞", "≠ layers   NaN or ∞"} <= texts
    assert "other values, NaN or ∞" in page.locator(".legend").inner_text()
    rows = page.get_by_role("table", name="Names").locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows] == ["layers.2.w", "zero"]
    assert "NaN or ∞" not in rows[1] and "Infinity" in rows[1]


def test_a_tap_shows_what_a_pointer_shows(page: Any, tmp_path: Path) -> None:
    opened(page, page_of({"w": torch.ones(99)}, tmp_path))
    chart = page.locator(".chart", has=page.locator("canvas")).last
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    finger = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 150}
    touch = page.context.new_cdp_session(page)
    for kind, points in (("touchStart", [finger]), ("touchEnd", [])):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    tip = chart.locator(".tip")
    tip.wait_for(state="visible")
    assert "rank 0" in tip.inner_text()
    page.evaluate("scrollBy(0, -50)")
    tip.wait_for(state="hidden")
