"""The data of the page of `dcpx trace`: each operation, its phases by rank, its rows of boxes.

Columns, and bounded: boxes that a picture cannot tell apart are one; workers are drawn of a few
ranks, those that took longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcpx._text import printable

if TYPE_CHECKING:
    from torch_dcpx.cli.trace import Trace

_MOST_OPERATIONS = 20  # the newest
_MOST_RANKS = 32  # whose workers are drawn
_FINEST = 1000  # parts of a rank's time: what lies nearer is one box


class _Row(NamedTuple):
    """The boxes of one thread or worker of a rank."""

    rank: int
    host: str
    label: str  # of the thread or worker
    is_worker: bool
    boxes: list[list[int]]  # number of the name, begin and length in us, bytes


def trace_data(
    traces: Sequence[Trace],
    rows_of: Callable[[list[Trace]], list[dict[str, Any]]],
    events_of: Callable[[Trace], list[dict[str, Any]]],
    path: object,
) -> dict[str, Any]:
    """Returns what the page shows.

    Args:
        traces: of the chosen operations.
        rows_of: gives the table of phases of some traces.
        events_of: gives the events of a trace, which are read one trace at a time.
        path: of the merged trace.
    """
    grouped: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        grouped.setdefault(trace.operation, []).append(trace)
    shown = list(grouped.values())[-_MOST_OPERATIONS:]
    return {
        "out": printable(path),
        "left_out": len(grouped) - len(shown),
        "operations": [_operation(one, rows_of(one), events_of) for one in shown],
    }


def errors_of(traces: Sequence[Trace]) -> list[str]:
    """Returns what failed, and where."""
    errors = {f"{t.about['error']} on rank {t.about['rank']}" for t in traces if "error" in t.about}
    return sorted(errors)


def _operation(
    traces: Sequence[Trace],
    rows: list[dict[str, Any]],
    events_of: Callable[[Trace], list[dict[str, Any]]],
) -> dict[str, Any]:
    about = traces[0].about
    origin_ns = min(trace.about["origin_ns"] for trace in traces)
    busiest = sorted(traces, key=_worked_s, reverse=True)
    with_workers = {id(trace) for trace in busiest[:_MOST_RANKS]}
    names: dict[str, int] = {}
    found: list[_Row] = []
    for trace in sorted(traces, key=lambda trace: trace.about["rank"]):
        shift_us = (trace.about["origin_ns"] - origin_ns) / 1000
        events = events_of(trace)
        found += _rows(trace, events, shift_us, names, has_workers=id(trace) in with_workers)
    return {
        "operation": printable(about["operation"]),
        "id": printable(about["id"]),
        "path": printable(about["path"]),
        "ranks": len({trace.about["rank"] for trace in traces}),
        "ranks_with_workers": min(len(traces), _MOST_RANKS),
        "errors": list(map(printable, errors_of(traces))),
        "phases": [{**row, "phase": printable(row["phase"])} for row in rows],
        "names": list(map(printable, names)),
        "rows": [row._asdict() for row in found],
    }


def _worked_s(trace: Trace) -> float:
    """Returns the seconds of a rank's workers: phases may wait for other ranks."""
    seconds = trace.about["seconds"].items()
    return sum(float(each) for name, each in seconds if name.startswith("worker: "))


def _rows(
    trace: Trace,
    events: Sequence[dict[str, Any]],
    shift_us: float,
    names: dict[str, int],
    *,
    has_workers: bool,
) -> list[_Row]:
    rank, host = trace.about["rank"], printable(trace.about["host"])
    labels = {
        event["tid"]: printable(_name_in(event.get("args")))
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    spans = [event for event in events if event["ph"] == "X" and event.get("cat") != "operation"]
    end = max((event["ts"] + event["dur"] for event in spans), default=0)
    tracks: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(spans, key=lambda each: each["ts"]):
        if has_workers or event.get("cat") == "phase":
            tracks.setdefault(event["tid"], []).append(event)
    found = []
    for tid, own in tracks.items():
        is_worker = all(event.get("cat") != "phase" for event in own)
        drawn = [event for event in own if is_worker or event.get("cat") == "phase"]
        boxes = _merged(drawn, shift_us, end / _FINEST, names)
        found.append(_Row(rank, host, labels.get(tid, f"thread {tid}"), is_worker, boxes))
    workers = [row for row in found if row.is_worker]
    workers.sort(key=lambda row: (len(row.label), row.label))  # 2 before 10
    return [*(row for row in found if not row.is_worker), *workers]


def _merged(
    events: Sequence[dict[str, Any]], shift_us: float, finest_us: float, names: dict[str, int]
) -> list[list[int]]:
    """Returns boxes; neighbours of one name that a picture cannot tell apart are one."""
    boxes: list[list[int]] = []
    for event in events:
        name = names.setdefault(event["name"], len(names))
        begin, length = round(event["ts"] + shift_us), round(event["dur"])
        nbytes = event["args"].get("bytes", 0) if isinstance(event.get("args"), dict) else 0
        nbytes = nbytes if type(nbytes) is int and 0 <= nbytes < 1 << 63 else 0
        last = boxes[-1] if boxes else None
        if last and last[0] == name and begin - last[1] - last[2] <= finest_us:
            last[2] = max(last[2], begin + length - last[1])
            last[3] += nbytes
        else:
            boxes.append([name, begin, length, nbytes])
    return boxes


def _name_in(args: object) -> str:
    return str(args.get("name", "")) if isinstance(args, dict) else ""
