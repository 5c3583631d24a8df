"""`dcpx trace`: merges the traces that ranks wrote to DCPX_TRACE_DIR, and says where time went."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

from torch_dcpx._json import parsed_json
from torch_dcpx._text import counted
from torch_dcpx._trace_files import VARIABLE, VERSION, about_merged, write_trace
from torch_dcpx.cli.output import FINE, put_json, put_lines, put_table
from torch_dcpx.cli.page import Page, put_written
from torch_dcpx.cli.trace_page import errors_of, trace_data
from torch_dcpx.errors import StorageError, UnsupportedError
from torch_dcpx.storage.directory import storage_errors


class Trace(NamedTuple):
    """The trace of one rank of one save or load."""

    path: Path
    about: dict[str, Any]  # its `otherData`

    @property
    def operation(self) -> tuple[str, str]:
        """Returns the name and the id, which all its ranks share."""
        return self.about["operation"], self.about["id"]

    @property
    def process(self) -> tuple[int, str, int]:
        return self.about["rank"], self.about["host"], self.about["pid"]


def run_trace(
    folder: Path,
    out: Path,
    *,
    save_id: str | None,
    takes_all: bool,
    overwrite: bool,
    as_json: bool,
    page: Page | None,
) -> int:
    """Merges the newest operation in `folder`, or those of an id, or all, and draws them on `page`.
    Returns the exit code.
    """
    traces = _chosen(_read_all(folder), folder, save_id, takes_all=takes_all)
    write_trace(_merged(traces), out, overwrite=overwrite)
    rows = _rows(traces)
    if page is not None:
        data = trace_data(traces, _rows, lambda trace: _read(trace.path)[1], out)
        page.write("trace", data)
    errors = errors_of(traces)
    operations = dict.fromkeys(trace.operation for trace in traces)
    if as_json:
        named = [{"operation": name, "id": own_id} for name, own_id in operations]
        head = {"out": str(out), "operations": named, "files": len(traces)}
        put_json({**head, "errors": errors, "phases": rows})
        return FINE
    ranks = counted(len({trace.about["rank"] for trace in traces}), "rank")
    first = traces[0].about
    what = f"{first['operation']} of '{first['path']}' ({first['id'][:12]})"
    what = what if not takes_all and len(operations) == 1 else counted(len(traces), "trace")
    put_lines([f"{what}, {ranks}: {out}", *(f"failed: {error}" for error in errors)])
    times = ("min_s", "median_s", "max_s")
    put_table(
        ["phase", "#ranks", "#min s", "#median s", "#max s", "slowest"],
        (
            (
                row["phase"],
                row["ranks"],
                *(f"{row[key]:.3f}" for key in times),
                f"rank {row['slowest']}",
            )
            for row in rows
        ),
    )
    put_written(page)
    return FINE


def _read_all(folder: Path) -> list[Trace]:
    with storage_errors("read traces in", folder, is_read=True):
        paths = sorted(path for path in folder.iterdir() if _is_named_so(path))
    # Without their events, which are megabytes: a day of training leaves thousands of files.
    found = ((path, _read(path)[0]) for path in paths)
    traces = [Trace(path, about) for path, about in found if not about.get("merged")]
    if not traces:
        text = f"no trace in '{folder}': set {VARIABLE}={folder} where the job runs"
        raise StorageError(text, errno=errno.ENOENT, path=str(folder))
    return traces


def _is_named_so(path: Path) -> bool:
    return path.suffix == ".json" and not path.name.startswith(".") and path.is_file()


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns `otherData` and the events of a file; of a merged one no events."""

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text} is no number of JSON")

    try:
        with storage_errors("read the trace", path, is_read=True):
            about = about_merged(path)
            if about is not None and about["dcpx_trace"] == VERSION:
                return about, []
            value = parsed_json(path.read_bytes(), constant_hook=refuse)
    except (ValueError, RecursionError) as error:
        text = f"read the trace '{path}': no whole JSON: {error}"
        raise _not_read(path, text) from error
    about = value.get("otherData") if isinstance(value, dict) else None
    if not isinstance(about, dict) or "dcpx_trace" not in about:
        text = f"'{path}' is no trace of torch-dcpx: move it out of the directory"
        raise _not_read(path, text)
    if about["dcpx_trace"] != VERSION:
        text = f"'{path}' is a trace of format {about['dcpx_trace']!r:.40}, known is {VERSION}"
        raise UnsupportedError(text)
    if about.get("merged"):
        return about, []
    events = value.get("traceEvents")
    if not (_is_about(about) and isinstance(events, list) and all(map(_is_event, events))):
        raise _not_read(path, f"'{path}' is a damaged trace")
    return about, events


def _not_read(path: Path, text: str) -> StorageError:
    """Returns the error of a file that leaves the question of the time without an answer."""
    return StorageError(text, errno=errno.EBADMSG, path=str(path))


def _is_about(about: dict[str, Any]) -> bool:
    texts = all(type(about.get(key)) is str for key in ("operation", "id", "path", "host"))
    numbers = all(_is_count(about.get(key)) for key in ("rank", "pid", "origin_ns"))
    seconds = about.get("seconds")
    is_timed = isinstance(seconds, dict) and all(map(_is_time, seconds.values()))
    return texts and numbers and is_timed and type(about.get("error", "")) is str


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or type(event.get("name")) is not str:
        return False
    numbers = _is_time(event.get("ts")) and _is_time(event.get("dur"))
    return event.get("ph") in ("X", "M") and numbers and _is_count(event.get("tid"))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1 << 63


def _chosen(
    traces: list[Trace], folder: Path, save_id: str | None, *, takes_all: bool
) -> list[Trace]:
    """Returns the traces to merge: all, or of each rank of one operation the newest. Loads by a
    DcpxReader have the id of their checkpoint, and so may be several.
    """
    traces = sorted(traces, key=lambda trace: int(trace.about["origin_ns"]))
    if save_id is not None:
        traces = [trace for trace in traces if trace.about["id"].startswith(save_id)]
        if not traces:
            text = f"no trace of a save '{save_id}' in '{folder}'"
            raise StorageError(text, errno=errno.ENOENT, path=str(folder))
    elif takes_all:
        return traces
    else:
        newest = traces[-1].operation
        traces = [trace for trace in traces if trace.operation == newest]
    return list({(*trace.operation, trace.about["rank"]): trace for trace in traces}.values())


def _merged(traces: list[Trace]) -> dict[str, Any]:
    origin_ns = min(trace.about["origin_ns"] for trace in traces)
    pids = _pids(trace.process for trace in traces)
    events = []
    for trace in traces:
        about, own = _read(trace.path)
        shift_us = (about["origin_ns"] - origin_ns) / 1000
        pid = pids[about["rank"], about["host"], about["pid"]]
        for event in own:
            shifted = event["ts"] + shift_us if event["ph"] == "X" else 0
            events.append({**event, "pid": pid, "ts": shifted})
    events.sort(key=lambda event: (event["ph"] == "X", event["ts"], -event["dur"]))
    about = {"dcpx_trace": VERSION, "merged": len(traces), "origin_ns": origin_ns}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _pids(processes: Iterable[tuple[int, str, int]]) -> dict[tuple[int, str, int], int]:
    """Returns a number for each process: its rank, or one behind all ranks where two have it."""
    known = sorted(set(processes))
    numbers: dict[tuple[int, str, int], int] = {}
    behind = known[-1][0] + 1
    for process in known:
        is_first = process[0] not in numbers.values()
        numbers[process] = process[0] if is_first else behind
        behind += not is_first
    return numbers


def _rows(traces: list[Trace]) -> list[dict[str, Any]]:
    """Returns the seconds of each phase by rank; of several operations their sums."""
    phases: dict[str, dict[int, float]] = {}
    for trace in traces:
        for phase, seconds in trace.about["seconds"].items():
            ranks = phases.setdefault(phase, {})
            ranks[trace.about["rank"]] = ranks.get(trace.about["rank"], 0.0) + seconds
    return [
        {
            "phase": phase,
            "ranks": len(ranks),
            "min_s": min(ranks.values()),
            "median_s": median(ranks.values()),
            "max_s": max(ranks.values()),
            "slowest": max(ranks, key=ranks.__getitem__),
        }
        for phase, ranks in sorted(phases.items(), key=lambda each: ":" in each[0])
    ]
