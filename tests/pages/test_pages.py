"""The pages of `dcpx inspect --html` and `dcpx diff --html` in a browser, at two widths.

The `page` fixture fails each test whose page asks for the network or writes an error.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.page_fixture import WIDTHS, overflow_of
from support.page_samples import (
    EXPERTS,
    GRID,
    WIDTH,
    forge_many,
    language_model,
    save_language_model,
)
from support.rank_saves import rows_of, save_ranks
from support.saves import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx.cli.app import app

UP = "model.layers.0.mlp.up_proj.weight"
HOSTILE = [
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "<!--<script>.weight",
    "__proto__.constructor.weight",
    "a\u202eb\x1b[2J\ud800.c",
    "${data}$style.'\"\\`",
    ".".join(["deep"] * 500),
]


def written(path: Path, *args: object) -> Path:
    """Runs dcpx with `--html path`; returns the page."""
    result = CliRunner().invoke(app, [*map(str, args), "--html", str(path)])
    assert f"wrote '{path}'" in result.stdout.replace("\n", ""), result.output
    return path


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints a and b, which differ in a few ways, and the pages of `inspect` and `diff`."""
    folder = tmp_path_factory.mktemp("pages")
    save_language_model(folder / "a")
    up = language_model()[UP] * 2
    changes: dict[str, Any] = {
        UP: up, "model.norm.weight": torch.ones(WIDTH), "optim.exp_avg.norm.weight": None,
        "model.embed_tokens.weight": torch.ones(520, WIDTH, dtype=torch.bfloat16),
        "model.lora.weight": torch.ones(64, 64),
    }  # fmt: skip
    save_language_model(folder / "b", **changes)
    written(folder / "inspect.html", "inspect", folder / "a")
    written(folder / "diff.html", "diff", folder / "a", folder / "b")
    return folder


def opened(page: Any, path: Path, width: int = 1280) -> Any:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    page.locator(".modules canvas").first.wait_for()
    page.wait_for_function("() => document.querySelector('.modules canvas').height > 200")
    return page


# A copy of a drawing, for a script that reads points of it.
COPIED = """(selector) => {
    const canvas = document.querySelector(`${selector} canvas`);
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
    copy.drawImage(canvas, 0, 0);
    return new Uint32Array(copy.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
}"""


def colors_of(page: Any, selector: str) -> int:
    """Returns how many colours a drawing has once it has any."""
    count = f"(selector) => new Set(({COPIED})(selector)).size"
    page.wait_for_function(f"(selector) => ({count})(selector) > 3", arg=selector)
    return int(page.evaluate(count, selector))


def point_at(page: Any, selector: str, x: float, y: float) -> tuple[float, float]:
    """Scrolls to a drawing; returns a point of the window, at shares of its width and height."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(selector).bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


# Keeps the texts that a drawing writes, beside its name.
RECORDED = """
    window.written = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
        const holder = this.canvas.closest?.(".chart");
        if (holder) written.push([holder.getAttribute("aria-label"), text]);
        return write.call(this, text, ...more);
    };"""


def texts_of(page: Any, label: str) -> set[str]:
    """Returns the texts of a drawing, on a page that has run `RECORDED` first."""
    found = "(label) => written.filter(([name]) => name.startsWith(label)).map(([, text]) => text)"
    page.wait_for_function(f"(label) => ({found})(label).length", arg=label)
    return set(page.evaluate(found, label))


def tooltip_at(page: Any, selector: str, x: float, y: float) -> str:
    page.mouse.move(*point_at(page, selector, x, y), steps=3)
    shown = page.locator(f"{selector} > .tip")
    shown.wait_for(state="visible")
    return str(shown.inner_text())


# ---- inspect -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["inspect", "diff"])
def test_page_draws_and_fits_its_window(
    page: Any, samples: Path, screenshots: Path, width: int, scheme: str, name: str
) -> None:
    page.emulate_media(color_scheme=scheme)
    opened(page, samples / f"{name}.html", width)
    assert colors_of(page, ".modules") > 20
    assert overflow_of(page) == []
    page.screenshot(path=screenshots / f"{name}-{scheme}-{width}.png", full_page=True)


def test_each_drawing_and_field_has_a_name_and_a_text_beside_it(page: Any, samples: Path) -> None:
    for name in ("inspect", "diff"):
        opened(page, samples / f"{name}.html")
        assert "dcpx" in page.title()
        assert page.locator("h1").count() == 1 and page.locator("html[lang=en]").count() == 1
        assert page.locator("[role=img]:not([aria-label])").count() == 0
        fields = "[...document.querySelectorAll('input, select')]"
        assert page.evaluate(f"{fields}.every((one) => one.labels.length === 1)")
        page.get_by_text("The same as a list").first.click()
        assert page.locator("details[open] tbody tr").count() >= 2


def test_head_says_who_wrote_what(page: Any, samples: Path) -> None:
    opened(page, samples / "inspect.html")
    text = page.locator(".facts").inner_text()
    tensors = len(language_model()) + 2
    wanted = (
        "torch-dcpx ",
        "torch 2.",
        "saved\n20",
        f"tensors\n{tensors}",
        "objects\n1",
        "ranks\n8",
    )
    assert [each for each in wanted if each not in text] == []


@pytest.mark.parametrize("way", ["mouse", "keys"])
def test_click_goes_into_a_module_and_back(page: Any, samples: Path, way: str) -> None:
    opened(page, samples / "inspect.html")
    shown = page.get_by_role("navigation")
    assert shown.inner_text().startswith("all")
    if way == "mouse":
        page.mouse.click(*point_at(page, ".modules", 0.3, 0.015))
    else:
        page.get_by_text("The same as a list").first.press("Enter")
        page.get_by_role("button", name="optim.exp_avg", exact=True).press("Enter")
    page.wait_for_function("() => document.querySelector('nav').innerText.includes('exp_avg')")
    assert colors_of(page, ".modules") > 20
    shown.get_by_role("button", name="all").click()
    page.wait_for_function("() => !document.querySelector('nav').innerText.includes('exp_avg')")


def test_pointer_on_a_box_shows_its_bytes(page: Any, samples: Path) -> None:
    opened(page, samples / "inspect.html")
    text = tooltip_at(page, ".modules", 0.1, 0.3)
    assert "kB" in text and "%" in text and "float32 [" in text, text


def test_search_shows_where_a_tensor_lies(page: Any, samples: Path) -> None:
    opened(page, samples / "inspect.html")
    page.get_by_label("Part of a name").fill("MESH")
    page.get_by_role("button", name=GRID).first.click()
    assert page.locator("#chosen").inner_text() == GRID
    rows = page.get_by_role("table", name="Parts").locator("tbody tr")
    assert rows.count() == 8
    assert rows.nth(3).inner_text().split("\t")[:4] == [
        "rank 3", "[12, 16]", "[12, 16]", "__3_0.distcp",
    ]  # fmt: skip
    assert colors_of(page, ".shards") > 8
    # Rows 12 to 23 and the right half of the columns lie at these shares of the drawing.
    text = tooltip_at(page, ".shards", 0.75, 0.33)
    for part in ("rank 3", "__3_0.distcp", "[12, 16]", "float32", "[48, 32]", "at byte", "bytes"):
        assert part in text, text


def test_map_of_three_dimensions_shows_those_that_are_cut(page: Any, samples: Path) -> None:
    opened(page, samples / "inspect.html")
    page.get_by_label("Part of a name").fill(EXPERTS)
    page.get_by_text("Rows are dimension 0, columns dimension 2.").wait_for()


def test_search_without_a_hit_says_so_and_an_object_has_no_map(page: Any, samples: Path) -> None:
    opened(page, samples / "inspect.html")
    page.get_by_label("Part of a name").fill("nothing like it")
    page.get_by_text("0 of 103 names.").wait_for()
    page.get_by_label("Part of a name").fill("step")
    page.get_by_text("object, ").wait_for()
    assert page.locator(".shards").is_hidden()


def test_bars_of_ranks_have_the_numbers_of_ranks_that_wrote(page: Any, tmp_path: Path) -> None:
    whole = torch.ones(8, 4)
    parts = {rank: {"w": rows_of(whole, rank // 2, 2)} for rank in (1, 3)}
    save_ranks([parts.get(rank, {}) for rank in range(4)], tmp_path / "a")
    page.add_init_script(RECORDED)
    opened(page, written(tmp_path / "out.html", "inspect", tmp_path / "a"))
    assert {"1", "3"} == {text for text in texts_of(page, "Bytes by rank") if text.isdigit()}
    assert {"0", "1"} == {text for text in texts_of(page, "Bytes by file") if text.isdigit()}


def test_name_without_text_has_a_word_to_click(page: Any, tmp_path: Path) -> None:
    save({name: torch.ones(9) for name in ("", ".a", ".b", "x")}, tmp_path / "a")
    opened(page, written(tmp_path / "out.html", "inspect", tmp_path / "a"))
    page.get_by_text("The same as a list").first.click()
    inside = page.get_by_role("table", name="Inside all").locator("tbody tr td:first-child")
    assert sorted(inside.all_inner_texts()) == ["(no name)", "(no name)", "x"]
    page.get_by_role("table", name="Largest tensors").get_by_text("(no name)").click()
    assert page.locator("#chosen").inner_text() == "(no name)"


def test_tensor_without_elements_has_no_map(page: Any, tmp_path: Path) -> None:
    save({"w": torch.ones(9), "none": torch.empty(3, 0)}, tmp_path / "a")
    opened(page, written(tmp_path / "out.html", "inspect", tmp_path / "a"))
    page.get_by_label("Part of a name").fill("none")
    page.get_by_text("1 part. It has no elements.").wait_for()
    assert page.locator(".shards").is_hidden()


def test_fault_of_a_long_file_name_and_a_file_without_bytes_fit(page: Any, tmp_path: Path) -> None:
    index = MetadataIndex("w", torch.Size([0]))
    chunk = ChunkStorageMetadata(index.offset, torch.Size([9]))
    entry = TensorStorageMetadata(TensorProperties(), chunk.sizes, [chunk])
    storage = {index: _StorageInfo(f"__{'9' * 240}_0.distcp", 0, 36)}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Metadata({"w": entry}, None, storage)))
    page.add_init_script(RECORDED)
    opened(page, written(tmp_path / "out.html", "inspect", tmp_path / "a"))
    assert page.locator(".faults li").count() == 1
    assert overflow_of(page) == []
    assert {"0 B", "1 B"} == {text for text in texts_of(page, "Bytes by file") if "B" in text}


def test_scheme_that_changes_draws_again(page: Any, samples: Path) -> None:
    opened(page, samples / "diff.html")
    colors_of(page, ".modules")
    corner = f"() => ({COPIED})('.modules')[2000]"
    before = page.evaluate(corner)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"(before) => ({corner})() !== before", arg=before)


# ---- diff ----------------------------------------------------------------------------------------


def test_diff_counts_each_kind_and_lists_names(page: Any, samples: Path) -> None:
    opened(page, samples / "diff.html")
    rows = page.get_by_role("table", name="What changed").locator("tbody tr").all_inner_texts()
    counts = {row.split("\t")[0][1:].strip(): row.split("\t")[1] for row in rows}
    assert counts == {
        "appeared": "1", "gone": "1", "another shape": "1", "another dtype": "1",
        "a tensor here, an object there": "0", "other values": "1",
        "equal": str(len(language_model()) + 3 - 4),
    }  # fmt: skip
    listed = page.get_by_role("table", name="Names").locator("tbody tr")
    assert listed.count() == 5
    page.locator("#kind").select_option("values")
    assert [row.split("\t")[1] for row in listed.all_inner_texts()] == [UP]
    page.locator("#kind").select_option("all")
    page.get_by_label("Part of a name").fill("lora")
    (row,) = listed.all_inner_texts()
    assert row.split("\t")[1:] == ["model.lora.weight", "", "float32 [64, 64]", "", ""]


def test_pointer_on_a_box_of_diff_shows_both_sides(page: Any, samples: Path) -> None:
    opened(page, samples / "diff.html")
    text = tooltip_at(page, ".modules", 0.04, 0.2)
    assert "equal" in text, text


# ---- What a checkpoint's writer could want -------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_hostile_names_are_text(page: Any, tmp_path: Path, command: str) -> None:
    directory = tmp_path / "x<b>'$data"
    save({name: torch.ones(8) for name in HOSTILE}, directory)
    save({"plain": torch.ones(8)}, tmp_path / "other")
    more = [tmp_path / "other"] if command == "diff" else []
    opened(page, written(tmp_path / "out.html", command, directory, *more))
    assert "broken" not in page.title()
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    text = page.locator("main").inner_text()
    for shown in (*HOSTILE[:4], r"a\u202eb\x1b[2J\ud800.c", HOSTILE[5]):
        assert shown in text, shown
    colors_of(page, ".modules")
    for x in range(1, 20):
        page.mouse.move(*point_at(page, ".modules", x / 20, x / 20))
    assert page.locator("img").count() == 0 and "broken" not in page.title()
    assert overflow_of(page) == []


def test_policy_of_the_page_lets_nothing_else_run_or_load(browser: Any, samples: Path) -> None:
    context = browser.new_context()  # not that of `page`, where each refusal is a failure
    page = opened(context.new_page(), samples / "inspect.html")
    refused = page.evaluate("""() => new Promise((done) => {
        const refused = [];
        document.addEventListener("securitypolicyviolation", (event) => {
            refused.push(event.effectiveDirective);
            if (refused.length === 3) done(refused.sort());
        });
        const script = document.createElement("script");
        script.textContent = "document.title = 'broken'";
        document.body.append(script, Object.assign(new Image(), { src: "https://example.org/x" }));
        fetch("https://example.org/").catch(() => null);
    })""")
    assert refused == ["connect-src", "img-src", "script-src-elem"]
    assert "broken" not in page.title()
    context.close()


# ---- Many tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["layers", "flat"])
def test_a_hundred_thousand_tensors_stay_usable(
    page: Any, tmp_path: Path, screenshots: Path, names: str
) -> None:
    forge_many(tmp_path / "many", 100_000, names=names)
    opened(page, written(tmp_path / "many.html", "inspect", tmp_path / "many"))
    assert colors_of(page, ".modules") > 20
    assert page.locator("body *").count() < 3000
    page.screenshot(path=screenshots / f"many-{names}.png")
    before = page.get_by_role("navigation").inner_text()
    page.mouse.click(*point_at(page, ".modules", 0.02, 0.015))
    page.wait_for_function("(b) => document.querySelector('nav').innerText !== b", arg=before)
    wanted = "model.layers.77.block.4.weight_2" if names == "layers" else "t77042"
    page.get_by_label("Part of a name").fill(wanted)
    assert page.locator("#chosen").inner_text() == wanted
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        fits = (
            "document.querySelector('.modules canvas').getBoundingClientRect().right < innerWidth"
        )
        page.wait_for_function(f"() => {fits}")
        assert overflow_of(page) == []
    page.screenshot(path=screenshots / f"many-{names}-in.png")
