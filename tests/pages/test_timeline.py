"""The page of `dcpx trace`: ways to zoom, many boxes, names that could do harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.page_samples import write_traces
from support.page_texts import opened, run, texts_of

HOSTILE = [
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "${data}$style.'\"\\`",
    "a\u202eb\x1b[2J",
]
COUNTED = """
    window.filled = [];
    const fillRect = CanvasRenderingContext2D.prototype.fillRect;
    CanvasRenderingContext2D.prototype.fillRect = function (...at) {
        filled.push([this.fillStyle, ...at]);
        return fillRect.apply(this, at);
    };"""

IS_NEAR = "() => !document.querySelector('.zoom span').textContent.includes('2 s')"

Change = Callable[[int, dict[str, Any]], None]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], Path]:
    """Makes a page of the traces of four ranks, each changed first."""

    def make(change: Change) -> Path:
        write_traces(tmp_path / "traces", monkeypatch)
        monkeypatch.delenv("DCPX_TRACE_DIR")
        for rank, file in enumerate(sorted((tmp_path / "traces").glob("*.json"))):
            trace = json.loads(file.read_text())
            change(rank, trace)
            file.write_text(json.dumps(trace))
        out = tmp_path / "out.html"
        run("trace", tmp_path / "traces", "--out", tmp_path / "o", "--html", out)
        return out

    return make


def range_of(page: Any) -> tuple[float, float]:
    """Returns where the timeline begins and ends, in seconds."""
    units = {"s": 1, "ms": 1e-3, "µs": 1e-6}
    words = page.locator(".zoom span").inner_text().split()
    return float(words[0]) * units[words[1]], float(words[3]) * units[words[4]]


def test_wheel_drag_fingers_and_keys_zoom_and_move(
    page: Any, drawn: Callable[[Change], Path]
) -> None:
    opened(page, drawn(lambda *_: None))
    texts_of(page, "timeline")
    whole = range_of(page)
    holder = page.locator(".timeline")
    holder.scroll_into_view_if_needed()
    box = holder.bounding_box()
    at = {"x": box["x"] + 0.6 * box["width"], "y": box["y"] + 100}
    page.mouse.move(at["x"], at["y"])
    page.mouse.wheel(0, -100)  # the page's own
    assert range_of(page) == whole
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function(IS_NEAR)
    near = range_of(page)
    assert near[1] - near[0] == pytest.approx(1, abs=0.01)

    page.mouse.down()
    page.mouse.move(at["x"] - 100, at["y"], steps=4)
    page.mouse.up()  # which is no click on a box
    moved = range_of(page)
    assert moved[0] > near[0] and moved[1] - moved[0] == pytest.approx(1, abs=0.01)

    holder.focus()
    for key, span in (("-", 2), ("+", 1), ("+", 0.5), ("Home", 2)):
        page.keyboard.press(key)
        begin, end = range_of(page)
        assert end - begin == pytest.approx(span, abs=0.01)
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    assert range_of(page)[0] == 0
    page.keyboard.press("Home")

    touch = page.context.new_cdp_session(page)
    for kind, apart in (("touchStart", 50), ("touchMove", 75), ("touchMove", 100), ("touchEnd", 0)):
        fingers = [{"x": at["x"] - apart, "y": at["y"]}, {"x": at["x"] + apart, "y": at["y"]}]
        points = [] if kind == "touchEnd" else fingers
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.wait_for_function(IS_NEAR)
    begin, end = range_of(page)
    assert end - begin == pytest.approx(1, abs=0.05)


def test_a_hundred_thousand_boxes_are_few_rectangles_in_all_their_colours(
    page: Any, drawn: Callable[[Change], Path]
) -> None:
    names = ("copy", "write", "sync", "verify")

    def many(rank: int, trace: dict[str, Any]) -> None:
        events = trace["traceEvents"]
        about = [event for event in events if event["ph"] == "M" or event.get("cat") == "phase"]
        (worker, *_), ends = [event for event in events if event not in about][-1:], []
        for at in range(25_000):
            change = {"name": names[at % 4], "ts": 3e5 + 100.0 * at * (rank + 1), "dur": 60.0}
            ends.append({**worker, **change})
        trace["traceEvents"] = about + ends

    page.add_init_script(COUNTED)
    opened(page, drawn(many))
    texts = [text for text, *_ in texts_of(page, "timeline")]
    assert any(text.startswith("rank 3, writer: worker") for text in texts)
    rects = page.evaluate("filled")
    assert len(rects) < 20_000
    tones = page.evaluate("(names) => names.map((name) => paintOf(name))", list(names))
    labels = texts_of(page, "timeline")
    for rank in range(4):  # none of the names is lost between pixels
        y = next(y for text, _, y, _ in labels if f"rank {rank}, writer: w" in text)
        row = {tone for tone, _, top, _, high in rects if y - 12 <= top and top + high <= y + 12}
        assert set(tones) <= row


def test_hostile_names_are_text_and_nothing_is_asked_for(
    page: Any, drawn: Callable[[Change], Path]
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def change(rank: int, trace: dict[str, Any]) -> None:
        name = HOSTILE[rank]
        about = {"host": name, "path": HOSTILE[1], "id": HOSTILE[0], "operation": HOSTILE[1]}
        seconds = {name: 1.0, f"worker: {HOSTILE[1]}": 2.0}
        trace["otherData"] |= {**about, "error": HOSTILE[0], "seconds": seconds}
        for event in trace["traceEvents"]:
            event.update({"args": {"name": name}} if event["ph"] == "M" else {"name": name})

    path = drawn(change)
    page.context.set_offline(True)
    opened(page, path)
    texts = {text for text, *_ in texts_of(page, "timeline")}
    assert {f"rank 1, {HOSTILE[1]}", r"rank 3, a\u202eb\x1b[2J"} <= texts
    box = page.locator(".timeline").bounding_box()
    for x in range(1, 20):
        page.mouse.move(box["x"] + box["width"] * x / 20, box["y"] + 60)
    page.get_by_text("The same as a list").click()
    page.get_by_role("table", name="Boxes").wait_for()
    text = page.locator("main").inner_text()
    assert all(name in text for name in HOSTILE[:3])
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    assert "broken" not in page.title().replace(HOSTILE[1], "")
    assert asked == [path.as_uri()]


def test_trace_without_phases_says_so(page: Any, drawn: Callable[[Change], Path]) -> None:
    def change(rank: int, trace: dict[str, Any]) -> None:
        trace["traceEvents"] = []
        trace["otherData"]["seconds"] = {}

    opened(page, drawn(change))
    page.get_by_text("It recorded no phase").wait_for()
    assert page.locator(".chart").count() == 0 and page.locator("table").count() == 0


def test_many_names_make_a_short_legend_and_a_short_table(
    page: Any, drawn: Callable[[Change], Path]
) -> None:
    def change(rank: int, trace: dict[str, Any]) -> None:
        about, (span, *_) = trace["traceEvents"][:-1], trace["traceEvents"][-1:]
        trace["traceEvents"] = about + [{**span, "name": f"p{at}", "ts": at} for at in range(900)]
        trace["otherData"]["seconds"] = {f"p{at}": 1.0 for at in range(900)}

    opened(page, drawn(change))
    texts_of(page, "timeline")
    legend = page.locator(".legend li")
    assert legend.count() == 17 and legend.last.inner_text().endswith(" more")
    rows = page.get_by_role("table", name="Seconds by phase").locator("tbody tr")
    assert rows.count() == 200
    page.get_by_text("700 more: dcpx trace --json lists all.").wait_for()


def test_labels_of_long_names_lie_upon_no_box(
    page: Any, width: int, drawn: Callable[[Change], Path]
) -> None:
    def change(rank: int, trace: dict[str, Any]) -> None:
        trace["otherData"]["host"] = f"training-job-worker-{rank}." + "namespace.svc." * 5
        for event in trace["traceEvents"]:
            if event["ph"] == "M":
                event["args"] = {"name": f"thread {rank} " * 20}

    opened(page, drawn(change), width)
    lines: dict[int, list[tuple[float, float]]] = {}
    for _, x, y, wide in texts_of(page, "timeline"):
        assert x + wide <= width
        lines.setdefault(round(y), []).append((x, x + wide))
    for line in lines.values():
        line.sort()
        assert all(one[1] <= two[0] + 1 for one, two in pairwise(line)), line
