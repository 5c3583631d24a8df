"""`dcpx trace --html` draws what it merges: phases by rank and thread, workers of a few ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli import dcpx, scripts_of
from support.page_samples import write_traces

from torch_dcpx.cli import trace_page


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_traces(tmp_path / "traces", monkeypatch)
    monkeypatch.delenv("DCPX_TRACE_DIR")
    return tmp_path / "traces"


def drawn(traces: Path, *args: object) -> Any:
    out = traces.parent / "out.html"
    merged = traces.parent / "out.json"
    result = dcpx("trace", traces, "--out", merged, "--html", out, "--overwrite", *args)
    assert result.exit_code == 0, result.output
    return scripts_of(out)[0]


def test_each_thread_and_worker_of_each_rank_has_a_row_of_boxes(traces: Path) -> None:
    (one,) = drawn(traces)["operations"]
    assert (one["operation"], one["path"], one["ranks"]) == ("save", "/ckpt/step-100", 4)
    rows = [(row["rank"], row["label"], row["is_worker"]) for row in one["rows"]]
    own = [("MainThread", False), ("writer", False)]
    own += [(f"writer: worker {at}", True) for at in range(2)]
    assert rows == [(rank, *each) for rank in range(4) for each in own]
    named = [
        [(one["names"][name], begin, length) for name, begin, length, _ in row["boxes"]]
        for row in one["rows"]
    ]
    assert named[4] == [("plan", 10_000, 300_000)]
    assert named[5][0] == ("write", 310_000, 600_000)
    assert [name for name, *_ in named[6]] == ["copy", "write"] * 5
    phases = {row["phase"]: row for row in one["phases"]}
    assert (phases["write"]["max_s"], phases["write"]["slowest"]) == (pytest.approx(1.2), 3)


def test_command_prints_what_it_prints_without_a_page(traces: Path) -> None:
    out = traces.parent / "out.json"
    plain = dcpx("trace", traces, "--out", out).stdout
    page = traces.parent / "out.html"
    args = "trace", traces, "--out", out, "--html", page, "--overwrite"
    said = dcpx(*args).stdout
    assert said.startswith(plain) and f"wrote '{page}'" in said.replace("\n", "")
    page.unlink()
    assert json.loads(dcpx(*args, "--json").stdout)["files"] == 4


def test_page_that_is_there_is_refused_and_replaced_on_request(traces: Path) -> None:
    drawn(traces)
    args = "trace", traces, "--out", traces.parent / "out.json", "--html"
    page = traces.parent / "out.html"
    before = page.read_bytes()
    assert dcpx(*args, page).exit_code == 2 and page.read_bytes() == before
    assert dcpx(*args, page, "--overwrite").exit_code == 0
    page.write_text("mine")
    assert dcpx(*args, page, "--overwrite").exit_code == 2 and page.read_text() == "mine"


def test_page_stays_small_of_many_ranks_and_operations(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_page, "_MOST_RANKS", 2)
    (one,) = drawn(traces)["operations"]
    assert {row["rank"] for row in one["rows"] if row["is_worker"]} == {2, 3}
    assert len([row for row in one["rows"] if not row["is_worker"]]) == 8
    for number in range(30):
        for path in list(traces.glob("save-3f2a*rank0*")):
            trace = json.loads(path.read_text())
            trace["otherData"]["id"] = f"other{number}"
            (traces / f"other-{number}.json").write_text(json.dumps(trace))
    found = drawn(traces, "--all")
    assert (len(found["operations"]), found["left_out"]) == (20, 11)


def test_spans_that_a_picture_cannot_tell_apart_are_one_box(traces: Path) -> None:
    for path in traces.iterdir():
        trace = json.loads(path.read_text())
        event = trace["traceEvents"][-1]
        tiny = [{**event, "name": "copy", "ts": 10.0 * at, "dur": 9.0} for at in range(5000)]
        trace["traceEvents"] += tiny
        path.write_text(json.dumps(trace))
    (one,) = drawn(traces)["operations"]
    assert max(len(row["boxes"]) for row in one["rows"]) < 1000


def test_hostile_texts_of_a_trace_stay_in_the_data(traces: Path) -> None:
    evil = "</script><script>alert(1)</script>\x1b[2J\u202e"
    for path in traces.iterdir():
        trace = json.loads(path.read_text())
        trace["otherData"].update(path=evil, host=evil, error=evil)
        for event in trace["traceEvents"]:
            event.update(name=evil if event["ph"] == "X" else event["name"], args=[evil])
        path.write_text(json.dumps(trace))
    (one,) = drawn(traces)["operations"]
    text = (traces.parent / "out.html").read_text()
    assert text.count("<script") == 2 and "\x1b" not in text
    assert one["path"] == evil.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
