"""Draws the times that a page of measurements has: the picture says what its tables say.

python tests/bench/plot.py docs/develop/measurements.md save --svg docs/develop/performance-save.svg
python tests/bench/plot.py docs/develop/measurements.md load --svg docs/develop/performance-load.svg

Labels, bars and figures have columns of their own, each bar has its label beside it, and a state
names the sides that it lacks. So no legend is needed, no text can meet another, and colour is never
the only sign.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tables import part_of

# Okabe and Ito's colours, told apart by all; the bars' dark edge is what a pale one needs on white.
SIDES = {
    "raw": "#999999", "ours": "#0072B2", "dcpx": "#009E73", "stock_files": "#F0E442",
    "stock": "#D55E00", "stock2": "#E69F00", "safetensors": "#CC79A7",
}  # fmt: skip
INK, PAPER = "#222222", "#ffffff"
LABELS = {
    "save": {
        "raw": "limit (a C program)", "ours": "DcpxWriter", "dcpx": "dcpx.save",
        "stock": "stock DCP", "stock2": "stock DCP (2 threads)", "safetensors": "safetensors",
    },
    "load": {
        "raw": "limit (a C program)", "ours": "DcpxReader", "dcpx": "dcpx.load",
        "stock_files": "DcpxReader: stock files", "stock": "stock DCP",
        "safetensors": "safetensors",
    },
}  # fmt: skip
TITLES = {"save": "Durable saves by one process", "load": "Loads by one process"}
SUBTITLES = (
    "Seconds: shorter is better.",
    "Bar: median of the rounds. Line: least to most.",
    "Each state has a scale of its own.",
)
NO_TENSORS, OF_TENSORS = "20,000 Python scalars", ("raw", "safetensors")  # a state, who needs some
WIDTH, LINE, MARGIN, BARS, BARS_END, FONT = 480, 20, 14, 216, 392, 14
EM = 0.62  # of the font's size: more than a character takes, of wide fonts too


class Time(NamedTuple):
    """Seconds of one side in one state; `text` is as the table has it."""

    median: float
    least: float
    most: float
    text: str


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right
            and self.top < other.bottom and other.top < self.bottom
        )  # fmt: skip


def box_of(text: ET.Element) -> Box:
    """Returns what a text element takes at most."""
    x, y, size = (float(text.get(name, "0")) for name in ("x", "y", "font-size"))
    width = len(text.text or "") * size * EM * (1.1 if text.get("font-weight") else 1)
    left = x - width if text.get("text-anchor") == "end" else x
    return Box(left, y - size, left + width, y + 0.25 * size)


def read_times(part: str) -> dict[str, dict[str, Time]]:
    """Returns the times of each state that one process took, from the table of times."""
    found: dict[str, dict[str, Time]] = {}
    table = part.partition("### Times")[2].partition("###")[0]
    for state, side, shown in re.findall(r"^\| (.+?) \| (\w+) \| \d+ \| (.+?) \|", table, re.M):
        if side not in SIDES or state.endswith("2 ranks"):
            continue
        numbers, unit = shown.rsplit(" ", 1)
        scale = 1e-3 if unit == "ms" else 1.0
        values = [scale * float(value) for value in re.findall(r"[\d.]+", numbers)]
        median, least, most = values if len(values) == 3 else values * 3
        found.setdefault(state, {})[side] = Time(median, least, most, shown)
    return found


def gaps_of(state: str, times: dict[str, Time], labels: dict[str, str]) -> list[str]:
    """Returns a sentence for each reason why a state lacks sides."""
    missing = {side: label for side, label in labels.items() if side not in times}
    useless = OF_TENSORS if state.startswith(NO_TENSORS) else ()
    told = []
    for why, is_useless in (("Not measured", False), ("Has no tensors for", True)):
        named = [label for side, label in missing.items() if (side in useless) is is_useless]
        told += [f"{why}: {', '.join(named)}."] if named else []
    return told


def description(times: dict[str, dict[str, Time]], bench: str) -> str:
    """Returns the whole picture in words."""
    told = [f"Horizontal bars, a group a state. {' '.join(SUBTITLES)}"]
    for state, sides in times.items():
        figures = [f"{label} {sides[s].text}" for s, label in LABELS[bench].items() if s in sides]
        told += [f"{state}: {', '.join(figures)}.", *gaps_of(state, sides, LABELS[bench])]
    return " ".join(told)


class Picture:
    """An SVG that grows downwards, line by line."""

    def __init__(self, title: str, told: str) -> None:
        self.svg = ET.Element(
            "svg", xmlns="http://www.w3.org/2000/svg", role="img",
            attrib={"aria-labelledby": "title desc", "font-family": "Helvetica, Arial, sans-serif"},
        )  # fmt: skip
        ET.SubElement(self.svg, "title", id="title").text = title
        ET.SubElement(self.svg, "desc", id="desc").text = told
        self.paper = ET.SubElement(self.svg, "rect", width="100%", height="100%", fill=PAPER)
        self.y = 0.0

    def text(self, x: float, text: str, size: float, line: float = LINE, **more: str) -> None:
        """Writes on the next line, or with a `line` of 0 on the current one."""
        self.y += max(line, size + 4 if line else 0)
        attrib = {name.replace("_", "-"): value for name, value in more.items()}
        at = {"x": f"{x:g}", "y": f"{self.y:g}", "font-size": f"{size:g}", "fill": INK}
        ET.SubElement(self.svg, "text", at | attrib).text = text

    def bar(self, time: Time, most: float, color: str) -> None:
        """Draws on the current line a bar to the median, and a line from least to most."""
        unit = (BARS_END - BARS) / most
        top, middle = self.y - 12, self.y - 5
        ET.SubElement(
            self.svg, "rect", x=f"{BARS}", y=f"{top:g}", width=f"{max(1, time.median * unit):.1f}",
            height="14", fill=color, stroke=INK, attrib={"stroke-width": "0.7"},
        )  # fmt: skip
        ends = f"M{BARS + time.least * unit:.1f} {middle:g}H{BARS + time.most * unit:.1f}"
        ET.SubElement(self.svg, "path", d=ends, stroke=INK, attrib={"stroke-width": "1.6"})

    def close(self) -> str:
        """Returns the SVG."""
        height = f"{self.y + MARGIN:g}"
        self.svg.attrib |= {"viewBox": f"0 0 {WIDTH} {height}", "width": f"{WIDTH}"}
        self.svg.set("height", height)
        ET.indent(self.svg, " ")
        return ET.tostring(self.svg, encoding="unicode") + "\n"


def draw(part: str, bench: str) -> str:
    """Returns the picture of a bench's part of a page."""
    times, labels = read_times(part), LABELS[bench]
    picture = Picture(TITLES[bench], description(times, bench))
    picture.text(MARGIN, TITLES[bench], 18, font_weight="bold")
    for line in SUBTITLES:
        picture.text(MARGIN, line, 13)
    for state, sides in times.items():
        picture.y += 0.8 * LINE
        picture.text(MARGIN, state, FONT, font_weight="bold")
        most = max(sides[side].most for side in labels if side in sides)
        for side, label in labels.items():
            if side in sides:
                picture.text(MARGIN, label, FONT)
                picture.bar(sides[side], most, SIDES[side])
                median = re.sub(r" \(.+\)", "", sides[side].text)
                picture.text(WIDTH - MARGIN, median, FONT, line=0, text_anchor="end")
        for told in gaps_of(state, sides, labels):
            for line in folded(told, WIDTH - 2 * MARGIN, 13):
                picture.text(MARGIN, line, 13, font_style="italic")
    return picture.close()


def folded(text: str, width: float, size: float) -> Iterator[str]:
    """Yields lines of a list, cut behind its commas, that are no wider."""
    line = ""
    for word in re.split(r"(?<=,) ", text):
        if line and len(f"{line} {word}") * size * EM > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path, help="which tables.py has made")
    parser.add_argument("bench", choices=LABELS)
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args()
    args.svg.write_text(draw(part_of(args.page.read_text(), args.bench), args.bench))


if __name__ == "__main__":
    main()
