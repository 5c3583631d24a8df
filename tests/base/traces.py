"""What every Chrome trace of ours is."""

from __future__ import annotations

import json
from typing import Any


def assert_is_trace(trace: Any) -> list[dict[str, Any]]:
    """Returns the events of a Chrome trace: sorted, and on one thread within or beside another."""
    assert trace == json.loads(json.dumps(trace, allow_nan=False))
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        assert event["ph"] in ("X", "M")
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (type(event["pid"]), type(event["tid"])) == (int, int)
        assert 0 <= event["tid"] < 1 << 32  # what Perfetto takes
    spans = [event for event in events if event["ph"] == "X"]
    assert events[-len(spans) :] == spans
    assert [event["ts"] for event in spans] == sorted(event["ts"] for event in spans)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == {(event["pid"], event["tid"]) for event in spans}
    open_until: dict[tuple[int, int], list[float]] = {}
    for event in spans:
        ends = open_until.setdefault((event["pid"], event["tid"]), [])
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 0.001:  # microseconds, rounded to a nanosecond
            ends.pop()
        assert not ends or end <= ends[-1] + 0.002
        ends.append(end)
    return spans
