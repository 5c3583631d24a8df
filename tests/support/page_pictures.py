"""Compares what a browser shows of a page with what it showed before: `tests/pages/golden`.

Fonts differ between machines, so no pixels are compared: each block of a page (head, headings,
legends, drawings, tables) has its left edge, width and height, and a coarse picture of its colours,
a few cells wide. Texts hardly change a cell; another colour, order or layout does.

    DCPX_NEW_PICTURES=1 make test-pages    draws the golden files anew: look at build/pages first
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

GOLDEN = Path(__file__).resolve().parents[1] / "pages" / "golden"
IS_NEW = os.environ.get("DCPX_NEW_PICTURES", "") not in ("", "0")

COLUMNS, ROWS = 16, 8  # cells of a coarse picture
_EDGE = 4  # pixels that a left edge or a width may differ by
_HEIGHT = 0.35  # share that a height may differ by, as texts fold elsewhere
# Of 255, what a cell may differ by: in a channel; and in its hue, which texts change little.
_CHANNEL = {"drawing": 24, "text": 60}
_HUE = 12  # of a drawing
_CELLS = 0.08  # share of cells that may differ by more

_BLOCKS = "h1, .facts, .faults, h2, .legend, .ramp, .fields, .zoom, .chart, .scroll, details"

# The blocks of a page; and a picture, which the browser makes small by means of whole areas.
_BOXES = """(selector) => [...document.querySelectorAll(selector)]
    .filter((one) => one.offsetParent && !one.closest("details:not([open]) > :not(summary)"))
    .map((one) => {
        const { left, top, width, height } = one.getBoundingClientRect();
        return [one.className || one.localName, left, top + scrollY, width, height].map(
            (each) => (typeof each === "number" ? Math.round(each) : each));
    })"""
_CELLS_OF = """async ([png, boxes, columns, rows]) => {
    const bytes = Uint8Array.from(atob(png), (char) => char.charCodeAt(0));
    const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
    const whole = new OffscreenCanvas(image.width, image.height).getContext("2d");
    whole.drawImage(image, 0, 0);
    return boxes.map(([, left, top, width, height]) => {
        const { data } = whole.getImageData(left, top, Math.max(1, width), Math.max(1, height));
        const sums = Array.from({ length: columns * rows }, () => [0, 0, 0, 0]);
        for (let y = 0; y < height; y += 1) {
            for (let x = 0; x < width; x += 1) {
                const cell = sums[Math.floor((y * rows) / height) * columns + Math.floor((x * columns) / width)];
                const at = 4 * (y * width + x);
                for (let channel = 0; channel < 3; channel += 1) cell[channel] += data[at + channel];
                cell[3] += 1;
            }
        }
        return sums.flatMap(([red, green, blue, count]) => [red, green, blue].map((each) => Math.round(each / Math.max(1, count))));
    });
}"""  # noqa: E501


# Each drawing has the width of its place; one that has just got another draws in the next frame.
IS_DRAWN = """() => [...document.querySelectorAll(".chart")].every((one) => one.hidden
    || Math.abs((one.querySelector("canvas")?.width ?? 0) - one.clientWidth) <= 1)"""
_NEXT_FRAMES = """() => new Promise((done) =>
    requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))))"""


class Block(NamedTuple):
    """A part of a page, as it was shown."""

    what: str
    left: int  # pixels
    width: int
    height: int
    cells: bytes  # three channels of each


def blocks_of(page: Any, helper: Any, picture: Path) -> list[Block]:
    """Takes a picture of a page into a file; returns its blocks, from top to bottom.

    Args:
        helper: an empty page, whose scripts no policy forbids: it makes the picture small.
    """
    page.evaluate(_NEXT_FRAMES)
    boxes = page.evaluate(_BOXES, _BLOCKS)
    png = base64.b64encode(page.screenshot(path=picture, full_page=True)).decode()
    cells = helper.evaluate(_CELLS_OF, [png, boxes, COLUMNS, ROWS])
    return [
        Block(what, left, width, height, bytes(own))
        for (what, left, _, width, height), own in zip(boxes, cells, strict=True)
    ]


def differences(found: list[Block], name: str) -> list[str]:
    """Returns how blocks differ from the golden file; writes that one instead where it is asked."""
    file = GOLDEN / f"{name}.json"
    if IS_NEW:
        GOLDEN.mkdir(exist_ok=True)
        lines = [json.dumps([*one[:4], base64.b64encode(one.cells).decode()]) for one in found]
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        return []
    read = json.loads(file.read_text())
    wanted = [Block(*one[:4], base64.b64decode(one[4])) for one in read]
    kinds = [one.what for one in found], [one.what for one in wanted]
    if kinds[0] != kinds[1]:
        return [f"blocks {kinds[0]}, not {kinds[1]}"]
    return [
        f"block {at} ({two.what}): {why}"
        for at, (one, two) in enumerate(zip(found, wanted, strict=True))
        for why in _unlike(one, two)
    ]


def _unlike(one: Block, two: Block) -> list[str]:
    wrong = []
    if two.what.startswith("ramp"):  # it stands in a line of text
        one = one._replace(left=two.left)
    for name, edge in (("left", _EDGE), ("width", _EDGE), ("height", _HEIGHT * two.height + 12)):
        # As wide as their texts: a button, a legend's bar, a folded list.
        is_by_text = name == "width" and two.what in ("details", "zoom")
        a, b = getattr(one, name), getattr(two, name)
        if abs(a - b) > edge and not is_by_text:
            wrong.append(f"its {name} is {a}, not {b}")
    starts = range(0, 3 * COLUMNS * ROWS, 3)
    kind = "drawing" if two.what.startswith("chart") else "text"
    many = sum(_is_unlike(one.cells[at : at + 3], two.cells[at : at + 3], kind) for at in starts)
    if many > _CELLS * len(starts):
        wrong.append(f"{many} of {len(starts)} cells have other colours")
    return wrong


def _is_unlike(one: bytes, two: bytes, kind: str) -> bool:
    red, green, blue = (a - b for a, b in zip(one, two, strict=True))
    hue = max(abs(red - green), abs(blue - green)) if kind == "drawing" else 0
    return max(abs(red), abs(green), abs(blue)) > _CHANNEL[kind] or hue > _HUE
