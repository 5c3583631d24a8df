"""Pages look as they did: their blocks and colours, against `golden` (support/page_pictures.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.page_pictures import IS_DRAWN, IS_NEW, blocks_of, differences
from support.page_samples import language_model, save_language_model, write_traces

from torch_dcpx.cli.app import app
from torch_dcpx.cli.page import Page

PAGES = ("inspect", "diff", "trace")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page of each command, of the same data on every machine."""
    folder = tmp_path_factory.mktemp("pictures")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # so that the paths on the pages are short, and the same
        save_language_model(Path("a"))
        write_traces(Path("traces"), patch)
        patch.delenv("DCPX_TRACE_DIR")  # to inspect is to read, which would leave one, too
        for args in (["inspect", "a"], ["trace", "traces", "--out", "out.json"]):
            result = CliRunner().invoke(app, [*args, "--html", f"{args[0]}.html"])
            assert result.exit_code == 0, result.output
        Page(Path("diff.html"), is_replacing=False).write("diff", diff_data())
    return folder


def diff_data() -> dict[str, Any]:
    """Returns what `dcpx diff` puts in its page, with a change of each size and kind."""
    sizes = {name: tensor.nbytes for name, tensor in language_model().items()}
    names = list(sizes)
    whats = ["values" if at % 5 else "equal" for at in range(len(names))]
    whats[3], whats[20], whats[30], whats[41] = "dtype", "shape", "only in A", "only in B"
    rel = [10.0 ** -(at % 7) if what == "values" else None for at, what in enumerate(whats)]
    rel[6], rel[7], rel[8] = float("inf"), float("nan"), None
    items = {
        "name": names, "what": whats, "a": ["float32"] * len(names), "b": ["float32"] * len(names),
        "bytes_a": list(sizes.values()), "bytes_b": list(sizes.values()), "rel": rel,
        "max_abs": rel,
    }  # fmt: skip
    return {"a": "a", "b": "b", "equal": whats.count("equal"), "read_bytes": 0, "items": items}


@pytest.fixture
def helper(browser: Any) -> Iterator[Any]:
    """An empty page, which makes pictures small."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


def shown(page: Any, path: Path, width: int, scheme: str) -> Any:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_function(IS_DRAWN)
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page_looks_as_it_did(
    page: Any, helper: Any, drawn: Path, screenshots: Path, width: int, scheme: str, name: str
) -> None:
    shown(page, drawn / f"{name}.html", width, scheme)
    file = f"{name}-{scheme}-{width}"
    found = blocks_of(page, helper, screenshots / f"picture-{file}.png")
    assert differences(found, file) == []


# What somebody could break, as a style or a script that does it.
BREAKS = {
    "other colours": "document.querySelector('.chart').style.filter = 'hue-rotate(120deg)'",
    "a grey drawing": "document.querySelector('.chart').style.filter = 'grayscale(1)'",
    "no legend": "document.querySelector('.legend').remove()",
    "narrower": "document.querySelector('main').style.maxWidth = '1000px'",
    "not aligned": "document.querySelector('.chart').style.marginLeft = '30px'",
    "an empty drawing": "document.querySelector('.chart canvas').remove()",
    "mirrored": "document.querySelector('.chart').style.transform = 'scaleX(-1)'",
    "light in the dark": "document.documentElement.style.setProperty('--paper', '#ffffff')",
}


@pytest.mark.skipif(IS_NEW, reason="the golden files are drawn anew")
@pytest.mark.parametrize("what", BREAKS)
@pytest.mark.parametrize("name", PAGES)
def test_comparison_sees_what_somebody_breaks(
    page: Any, helper: Any, drawn: Path, tmp_path: Path, what: str, name: str
) -> None:
    shown(page, drawn / f"{name}.html", 1280, "dark")
    page.evaluate(f"() => {{ {BREAKS[what]}; }}")
    assert differences(blocks_of(page, helper, tmp_path / "x.png"), f"{name}-dark-1280") != []


@pytest.mark.parametrize("font", ["serif", "monospace"])
def test_comparison_bears_another_font(
    page: Any, helper: Any, drawn: Path, tmp_path: Path, font: str
) -> None:
    page.add_init_script(f"""
        const font = Object.getOwnPropertyDescriptor(CanvasRenderingContext2D.prototype, "font");
        const set = function (text) {{
            font.set.call(this, text.replace(/system-ui.*|sans-serif/, "{font}"));
        }};
        Object.defineProperty(CanvasRenderingContext2D.prototype, "font", {{ ...font, set }});
    """)
    for name in PAGES:
        shown(page, drawn / f"{name}.html", 1280, "light")
        page.evaluate("(font) => { document.body.style.fontFamily = font; }", font)
        assert differences(blocks_of(page, helper, tmp_path / "x.png"), f"{name}-light-1280") == []


def test_heads_of_modules_that_differ_are_not_grey(page: Any, drawn: Path) -> None:
    shown(page, drawn / "diff.html", 1280, "light")
    copy = "document.querySelector('.modules canvas')"
    red, green, blue, _ = page.evaluate(
        f"""() => {{
            const copy = new OffscreenCanvas(9, 9).getContext("2d");
            copy.drawImage({copy}, {copy}.width * 0.2, 1, 1, 1, 0, 0, 1, 1);
            return [...copy.getImageData(0, 0, 1, 1).data];
        }}"""
    )
    assert blue > red + 20, (red, green, blue)


def test_diff_shows_numbers_that_json_lacks(page: Any, drawn: Path) -> None:
    text = (drawn / "diff.html").read_text()
    json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    shown(page, drawn / "diff.html", 1280, "light")
    listed = page.get_by_role("table", name="Names").inner_text()
    assert "Infinity" in listed and "NaN" in listed
