"""Chrome trace files (Perfetto) of timelines: `trace_of` one, and the files of DCPX_TRACE_DIR.

    {"traceEvents": [{"name": "write", "cat": "phase", "ph": "X", "ts": 1.5, "dur": 20.0, ...}],
     "displayTimeUnit": "ms", "otherData": {"dcpx_trace": 1, "rank": 3, "origin_ns": ..., ...}}

`ts` and `dur` are microseconds; `origin_ns` is the time of `ts` 0, in nanoseconds since the epoch.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcpx._json import parsed_json
from torch_dcpx._replacing import Replacing
from torch_dcpx._text import shown_url
from torch_dcpx.errors import OptionError, StorageError, must_be

if TYPE_CHECKING:
    from torch_dcpx.timelines import Timeline

logger = logging.getLogger("torch_dcpx")

VARIABLE = "DCPX_TRACE_DIR"
VERSION = 1
_BEGIN, _ABOUT = b'{"traceEvents": [', b', "otherData": {"dcpx_trace": '
_ABOUT_WITHIN_BYTES = 64 << 10  # of the end
_MOST_TRIES = 100
_WORKER_SHIFT = 22  # Linux numbers threads below 2**22
_counter = itertools.count()
_warned: set[str] = set()  # directories that a trace could not be written to


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline as the JSON object of a trace."""
    phases, spans, busy = timeline.phases, timeline.spans, timeline.busy
    begins = [*(phase.began_ns for phase in phases), *(span.began_ns for span in spans)]
    origin_ns = min(begins, default=0)
    rank, about = timeline.rank, {"path": timeline.path, "id": timeline.operation_id}
    if timeline.error:
        about["error"] = timeline.error

    def event(
        name: str, kind: str, tid: int, began_ns: int, ended_ns: int, args: Any
    ) -> dict[str, Any]:
        ts, dur = (began_ns - origin_ns) / 1000, (ended_ns - began_ns) / 1000
        times = {"ph": "X", "ts": ts, "dur": dur}
        return {"name": name, "cat": kind, **times, "pid": rank, "tid": tid, "args": args}

    events = []
    for thread in dict.fromkeys(phase.thread for phase in phases):
        own = [phase for phase in phases if phase.thread == thread]
        end_ns = max(phase.ended_ns for phase in own)
        events.append(
            event(timeline.operation, "operation", thread, own[0].began_ns, end_ns, about)
        )
    events += [event(p.name, "phase", p.thread, p.began_ns, p.ended_ns, {}) for p in phases]
    tids = {phase.thread: timeline.thread_name(phase.thread) for phase in phases}
    for span in spans:
        is_call = span.kind == "engine"
        tid = span.thread if is_call else _worker_tid(span.thread, span.worker)
        if not is_call:
            tids[tid] = f"{timeline.thread_name(span.thread)}: worker {span.worker}"
        args = {"bytes": span.nbytes} if span.nbytes else {}
        events.append(event(span.kind, "worker", tid, span.began_ns, span.ended_ns, args))
    # Of events that begin together the longest is the outermost, and comes first.
    events.sort(key=lambda each: (each["ts"], -each["dur"]))
    return {
        "traceEvents": [*_names(rank, f"rank {rank} on {timeline.host}", tids), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "dcpx_trace": VERSION,
            "operation": timeline.operation,
            "rank": rank,
            "host": timeline.host,
            "pid": timeline.pid,
            **about,
            "origin_ns": origin_ns,
            "seconds": _seconds(phases, busy),
        },
    }


def _worker_tid(thread: int, worker: int) -> int:
    # One thread makes one call at a time, so that its workers' tracks are never shared.
    return (worker % 512 + 1 << _WORKER_SHIFT) | (thread % (1 << _WORKER_SHIFT))


def _names(pid: int, process: str, tids: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, {"name": process})
    yield _meta("process_sort_index", pid, 0, {"sort_index": pid})
    for index, (tid, name) in enumerate(sorted(tids.items())):
        yield _meta("thread_name", pid, tid, {"name": name})
        yield _meta("thread_sort_index", pid, tid, {"sort_index": index})


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "ts": 0, "dur": 0, "pid": pid, "tid": tid, "args": args}


def _seconds(phases: Iterable[Any], busy: Iterable[Any]) -> dict[str, float]:
    """Returns the seconds of each phase, and of each kind of work the mean over its workers."""
    found: defaultdict[str, float] = defaultdict(float)
    for phase in phases:
        found[phase.name] += (phase.ended_ns - phase.began_ns) / 1e9
    workers: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    work: defaultdict[str, float] = defaultdict(float)
    for row in busy:
        if row.kind != "engine":
            workers[row.kind].add((row.thread, row.worker))
            work[row.kind] += row.busy_ns / 1e9
    return {**found, **{f"worker: {kind}": work[kind] / len(workers[kind]) for kind in work}}


def write_trace(trace: dict[str, Any], path: Any, *, overwrite: bool = False) -> None:
    """Writes a trace to a new file, or in place of another trace, as `Replacing.put`.
    Raises OptionError, StorageError.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise must_be("path", path, "the path of a file")
    target = _local("path", os.fsdecode(path))
    try:
        rule = Replacing(overwrite, _is_trace, "trace that dcpx has written")
        rule.put(target, json.dumps(trace).encode())
    except OptionError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no system call takes
        text = f"write the trace '{target}': {getattr(error, 'strerror', None) or error}"
        raise StorageError(text, errno=getattr(error, "errno", None), path=str(target)) from error


def _is_trace(path: Path) -> bool:
    """Returns whether a file begins and ends as `trace_of` makes them."""
    with path.open("rb") as file:
        begin = file.read(len(_BEGIN))
        file.seek(max(0, path.stat().st_size - _ABOUT_WITHIN_BYTES))
        return begin == _BEGIN and _ABOUT in file.read()


def about_merged(path: Path) -> dict[str, Any] | None:
    """Returns `otherData` of a merged trace, without its events; None of another file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _ABOUT_WITHIN_BYTES))
        _, mark, about = file.read().rpartition(_ABOUT)
    try:
        found = parsed_json(mark.partition(b": ")[2] + about.rstrip()[:-1])
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("merged") else None


def _local(name: str, text: str) -> Path:
    if "://" in text or text.startswith("~"):  # else it would be a directory "s3:" or "~" here
        raise must_be(name, shown_url(text), "a path of this machine, no URL and without '~'")
    return Path(text)


def write_if_asked(timeline: Timeline) -> None:
    """Writes a timeline's file in DCPX_TRACE_DIR, if that is set. What fails is logged, once a
    directory: a trace is not worth a save.
    """
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return
    try:
        place = _local(VARIABLE, folder)
        place.mkdir(parents=True, exist_ok=True)
        trace = trace_of(timeline)
        for left in reversed(range(_MOST_TRIES)):
            try:
                write_trace(trace, place / file_name(timeline))
            except OptionError:  # a container before this one had the same host and pid
                if left:
                    continue
                raise
            return
    except Exception as error:  # noqa: BLE001 - logged; for want of memory as well
        if folder not in _warned:
            _warned.add(folder)
            text = "%s=%s: no trace of the %s of '%s' there: %s"
            logger.warning(text, VARIABLE, folder, timeline.operation, timeline.path, error)


def file_name(timeline: Timeline) -> str:
    """Returns a name that no other save or load of any rank has."""
    host = re.sub("[^A-Za-z0-9-]", "_", timeline.host)[:64]
    key = re.sub("[^A-Za-z0-9]", "", timeline.operation_id)[:12] or "unnamed"
    rank, pid = timeline.rank, timeline.pid
    return f"{timeline.operation}-{key}-rank{rank}-{host}-{pid}-{next(_counter)}.json"
