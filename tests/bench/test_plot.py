"""The pictures of performance.md: what they say, and that each word of them can be read."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from conftest import ROOT
from plot import LABELS, WIDTH, box_of, description, draw, gaps_of, read_times
from tables import new_page, part_of, put_on_page

DEVELOP = ROOT / "docs" / "develop"
BENCHES = sorted(LABELS)
PART = """### Times

| state | side | rounds | time (min-max) | GB/s | speed of ours to it |
| --- | --- | --- | --- | --- | --- |
| one state | ours | 3 | 1.5 (1-3) s | 3 |  |
| one state | stock | 1 | 900 ms | 3 | 9 |
| one state | engine | 3 | 1 (1-3) s | 3 | 9 |
| one state, 2 ranks | ours | 3 | 1 (1-3) s | 3 | 9 |
| 20,000 Python scalars, warm | ours | 3 | 20 (12.3-500) ms |  |  |

### Bytes

| state | side | needed MiB | engine read |
| --- | --- | --- | --- |
| one state | stock_files | 2048 | 2048 | 2048 | 0 | 1.000 |
"""


def measured(bench: str) -> str:
    return part_of((DEVELOP / "measurements.md").read_text(), bench)


def svg_of(bench: str) -> ET.Element:
    text = (DEVELOP / f"performance-{bench}.svg").read_text()
    return ET.fromstring(text.replace('xmlns="http://www.w3.org/2000/svg"', ""))


def texts_of(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


@pytest.mark.parametrize("bench", BENCHES)
def test_the_picture_is_what_the_tables_make_and_no_text_or_bar_meets_another(bench: str) -> None:
    assert (DEVELOP / f"performance-{bench}.svg").read_text() == draw(measured(bench), bench)
    svg = svg_of(bench)
    left, top, width, height = (float(n) for n in svg.attrib["viewBox"].split())
    boxes = [box_of(text) for text in svg.iter("text")]
    assert len(boxes) > 50 and width == WIDTH
    for box in boxes:
        assert left <= box.left and box.right <= width and top <= box.top and box.bottom <= height
    assert [pair for pair in itertools.combinations(boxes, 2) if pair[0].meets(pair[1])] == []
    bars = [rect for rect in svg.iter("rect") if rect.get("stroke")]
    assert len(bars) > 20
    for bar in bars:
        x, y, width, height = (float(bar.attrib[n]) for n in ("x", "y", "width", "height"))
        spot = type(boxes[0])(x, y, x + width, y + height)
        assert [box for box in boxes if box.meets(spot)] == []


@pytest.mark.parametrize("bench", BENCHES)
def test_each_state_has_a_bar_or_a_word_for_each_side_also_for_who_does_not_see(bench: str) -> None:
    svg, labels = svg_of(bench), LABELS[bench]
    assert svg.get("role") == "img" and svg.get("aria-labelledby") == "title desc"
    ids = {child.get("id"): child.text or "" for child in svg if child.get("id")}
    assert list(ids) == ["title", "desc"] and ids["title"]
    shown = " ".join(texts_of(svg))
    for state, times in read_times(measured(bench)).items():
        assert f"{state}: " in ids["desc"] and state in texts_of(svg)
        for side in times.keys() & labels.keys():
            text = times[side].text
            assert f"{labels[side]} {text}" in ids["desc"]
            assert text.split(" (")[0].removesuffix(" s") in shown
        gaps = gaps_of(state, times, labels)
        named = ", ".join(gap.partition(": ")[2].rstrip(".") for gap in gaps).split(", ")
        missing = [label for side, label in labels.items() if side not in times]
        assert sorted(named) == sorted(missing or [""])
        assert all(gap in shown for gap in gaps)


def numbers_of(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


def is_among(shown: str, values: list[float]) -> bool:
    """Whether a value that was measured is shown so, with fewer digits perhaps."""
    digits = len(shown.partition(".")[2])
    return float(shown) in [round(value, digits) for value in values]


def user_rows() -> list[list[str]]:
    page = (ROOT / "docs" / "reference" / "performance.md").read_text()
    lines = re.findall(r"^\| (.+ \| `\w+\.py.*`) \|$", page, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize("row", user_rows(), ids=lambda row: row[0])
def test_a_figure_for_users_is_one_that_was_measured(row: list[str]) -> None:
    _, stock, ours, ratio, command = row
    values = numbers_of(measured(command.strip("`").partition(".py")[0]))
    pair = [stock.split()[0], ours.split()[0]]
    assert all(is_among(shown, values) for shown in pair)
    quotients = [float(pair[0]) / float(pair[1]), float(pair[1]) / float(pair[0])]
    assert is_among(ratio, [*values, *(1 / value for value in values if value), *quotients])
    better = quotients["GB/s" in ours]
    assert 0.7 < float(ratio) / better < 1.4  # that of the rounds, not of the medians


def test_times_are_those_of_one_process_and_of_the_table_of_times() -> None:
    states = read_times(PART)
    assert {name: list(times) for name, times in states.items()} == {
        "one state": ["ours", "stock"], "20,000 Python scalars, warm": ["ours"],
    }  # fmt: skip
    assert states["one state"]["ours"] == (1.5, 1, 3, "1.5 (1-3) s")
    assert states["one state"]["stock"][:3] == (0.9, 0.9, 0.9)
    assert states["20,000 Python scalars, warm"]["ours"].most == 0.5


def test_a_gap_has_its_reason() -> None:
    states = read_times(PART)
    assert gaps_of("one state", states["one state"], LABELS["save"]) == [
        "Not measured: limit (a C program), dcpx.save, stock DCP (2 threads), safetensors."
    ]
    name = "20,000 Python scalars, warm"
    assert gaps_of(name, states[name], LABELS["load"]) == [
        "Not measured: dcpx.load, DcpxReader: stock files, stock DCP.",
        "Has no tensors for: limit (a C program), safetensors.",
    ]
    assert "stock DCP 900 ms. Not measured" in description(states, "save")


def test_plot_draws_a_page_that_tables_made(tmp_path: Path) -> None:
    page, svg = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text(put_on_page(new_page(), PART, "save"))
    plot = ROOT / "tests" / "bench" / "plot.py"
    subprocess.run([sys.executable, str(plot), str(page), "save", "--svg", str(svg)], check=True)
    assert svg.read_text() == draw(PART, "save")
