"""Runs the hostile corpus: each case in a forked child under an audit hook, watched from outside.

    python tests/hostile/driver.py SCRATCH [STRIDE SHIFT]

1. Everything is imported and used once on harmless and on damaged checkpoints, so that what a child
   then imports, compiles or opens is the case's doing.
2. A case is built, and a child runs every entry point on it. The child's audit hook notes what no
   load may do; its memory is measured entry by entry. inotify notes who opens a file outside.
3. A table of all cases; a line of JSON for each bad one; the exit status is 1 where there is one.

What is bad: executed, escaped, hung, crashed, memory, silent (no error, and not what was saved),
untyped (an error of no type of ours), removed (a save took away what it did not make).
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from hostile import watch
from hostile.corpus import STATE, Case, cases, ours, saved, stock
from support.machine import seconds
from support.states import blank_like
from torch.distributed.checkpoint.api import CheckpointException

import torch_dcpx
from torch_dcpx import DcpxError, DcpxReader, DcpxWriter, RepairError

DEADLINE_S = seconds(60)  # a watchdog: most cases take some milliseconds
MEMORY_BYTES = 256 << 20
BAD = ("executed", "escaped", "hung", "crashed", "memory", "silent", "untyped", "removed")


# ---- Entry points -------------------------------------------------------------------------------


def _dcp_load(ckpt: Path) -> Any:
    target = blank_like(STATE)
    dcp.load(target, storage_reader=DcpxReader(ckpt), no_dist=True)
    return target


def _own_load(ckpt: Path) -> Any:
    target = blank_like(STATE)
    torch_dcpx.load(target, ckpt)
    return target


def _read_metadata(ckpt: Path) -> Any:
    metadata = DcpxReader(ckpt).read_metadata()
    for table in (metadata.state_dict_metadata, metadata.storage_data):
        for _ in table.items():
            pass
    return None


def _save_over(ckpt: Path) -> Any:
    dcp.save(STATE, storage_writer=DcpxWriter(ckpt), no_dist=True)
    return _dcp_load(ckpt)


def _verify(ckpt: Path) -> Any:
    torch_dcpx.verify(ckpt)
    return None


def _repair(ckpt: Path) -> Any:
    with contextlib.suppress(RepairError):  # there is nothing to repair, or nothing to do it with
        torch_dcpx.repair(ckpt, accept_assumptions=True)
    return _dcp_load(ckpt)


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "read_metadata": _read_metadata,
    "dcp.load": _dcp_load,
    "torch_dcpx.load": _own_load,
}
ENTRIES["verify"] = _verify
# These change the checkpoint: each has a fresh one.
CHANGING: dict[str, Callable[[Path], Any]] = {"repair": _repair, "save over it": _save_over}


# ---- One entry point on one case ----------------------------------------------------------------


def _is_typed(error: BaseException) -> bool:
    if isinstance(error, CheckpointException):
        return all(_is_typed(cause) for cause, _ in error.failures.values())
    return isinstance(error, DcpxError) or _is_stocks(error)


def _is_stocks(error: BaseException) -> bool:
    """Stock's own words for a state that does not fit the metadata, which its planner says."""
    return (
        _made_by(error).startswith("torch/distributed/checkpoint/")
        or (isinstance(error, AssertionError) and "mismatch sizes" in str(error))
        or (
            isinstance(error, (RuntimeError, NotImplementedError))
            and "torch_loader" in _made_by(error)
        )
    )


def _made_by(error: BaseException) -> str:
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
    return name.partition("site-packages/")[2] or name


def _is_right(found: Any) -> bool:
    weight, value = found["weight"], found["value"]
    return (
        isinstance(weight, torch.Tensor)
        and torch.equal(weight, STATE["weight"])
        and value == STATE["value"]
    )


def _run_entry(entry: str, case: Case, ckpt: Path) -> tuple[str, str]:
    """Returns ("", what happened), or what is bad and why."""
    real_bytes = sum(p.lstat().st_blocks * 512 for p in ckpt.iterdir())
    peak_bytes = watch.begin_peak()
    watch.begin_events(ckpt)
    try:
        found = (ENTRIES | CHANGING)[entry](ckpt)
        outcome, bad = "loaded", ""
        is_saved = entry == "save over it"
        if found is not None and not _is_right(found) and (is_saved or not case.is_valid):
            bad = "silent"
    except BaseException as error:  # noqa: BLE001  a child reports all of them
        outcome = f"{type(error).__name__}: {error}"[:600]
        bad = "" if _is_typed(error) else "untyped"
        del error
    events = watch.end_events()
    grown = watch.peak() - peak_bytes
    if events:
        return "executed", "; ".join(events)[:600]
    if changed := watch.changed_state():
        return "executed", changed
    if grown > MEMORY_BYTES + 2 * real_bytes:
        return "memory", f"{grown >> 20} MiB for {real_bytes >> 10} KiB on disk; {outcome}"
    return bad, outcome


def _child(case: Case, ckpt: Path, entries: list[str], pipe: int) -> None:
    """Never returns. Writes a line before and after each entry point."""
    with contextlib.suppress(Exception, CheckpointException):
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        room = watch.status_bytes("VmSize") + (16 << 30)  # for the machine's sake
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    for entry in entries:
        os.write(pipe, json.dumps([entry]).encode() + b"\n")
        os.write(pipe, json.dumps([entry, *_run_entry(entry, case, ckpt)]).encode() + b"\n")
    os._exit(0)


def _lines(pid: int, pipe: int) -> tuple[list[list[str]], str]:
    """Reads a child's lines until it ends; kills one that says nothing for too long."""
    data, how = b"", ""
    until = time.monotonic() + DEADLINE_S
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            how = "hung"
            break
        piece = os.read(pipe, 1 << 16)
        if not piece:
            break
        data += piece
        until = time.monotonic() + DEADLINE_S
    _, status = os.waitpid(pid, 0)
    if not how and status != 0:
        how = "crashed"
    return [json.loads(line) for line in data.splitlines()], how


def _run_case(case: Case, root: Path) -> list[tuple[str, str, str]]:
    """Returns (entry point, what is bad or "", what happened) of one case."""
    results: list[tuple[str, str, str]] = []
    for entries in ([*ENTRIES], *([name] for name in CHANGING)):
        shutil.rmtree(root, ignore_errors=True)
        outside = watch.make_outside(root, saved)
        case.build(root)
        with watch.Outside(outside) as guard:
            _run_entries(case, root / "ckpt", entries, guard, results)
    return results


def _run_entries(
    case: Case,
    ckpt: Path,
    left: list[str],
    guard: watch.Outside,
    results: list[tuple[str, str, str]],
) -> None:
    while left:
        last = left[-1]
        before = watch.bystanders(ckpt)
        ours_end, childs_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours_end)
            _child(case, ckpt, left, childs_end)
        os.close(childs_end)
        lines, how = _lines(pid, ours_end)
        os.close(ours_end)
        done = [line for line in lines if len(line) == 3]
        results += [(entry, bad, what) for entry, bad, what in done]
        left = left[len(done) :]
        if how and left:
            results.append((left.pop(0), how, ""))
        if reached := guard.reached():
            results.append((last, "escaped", reached))
        if removed := watch.removed(ckpt, before):
            results.append((last, "removed", removed))


def _warm_up(root: Path) -> None:
    """Imports and uses everything once, errors included."""
    codecs.lookup("latin1")  # by which protocol 2 writes bytes
    for number, make in enumerate((stock, ours)):
        place = root / f"warm{number}"
        place.mkdir(parents=True)
        for entry in (ENTRIES | CHANGING).values():
            shutil.rmtree(place / "ckpt", ignore_errors=True)
            ckpt = make(place)
            entry(ckpt)
            for path in ckpt.iterdir():
                os.truncate(path, 100)
            with contextlib.suppress(Exception, CheckpointException):
                entry(ckpt)
    shutil.rmtree(root)


def main(scratch: str, stride: int = 1, shift: int = 0) -> int:
    """Runs every `stride`th case from `shift` on; returns the exit status."""
    root = Path(scratch).resolve() / "hostile"
    shutil.rmtree(root, ignore_errors=True)
    _warm_up(root)
    watch.install()
    counts: dict[str, Counter[str]] = {}
    points = bad_points = 0
    for number, case in enumerate(cases()):
        if number % stride != shift % stride:
            continue
        found = _run_case(case, root)
        row = counts.setdefault(case.kind, Counter())
        row["cases"] += 1
        points += len(ENTRIES) + len(CHANGING)
        for entry, bad, what in found:
            if bad:
                bad_points += 1
                row[bad] += 1
                print(json.dumps([case.kind, case.name, entry, bad, what]), flush=True)
    shutil.rmtree(root, ignore_errors=True)
    print(f"{'kind':34} {'cases':>6} " + " ".join(f"{bad:>8}" for bad in BAD))
    for kind, row in counts.items():
        print(f"{kind:34} {row['cases']:6} " + " ".join(f"{row[bad]:8}" for bad in BAD))
    total = sum(row["cases"] for row in counts.values())
    names = ", ".join([*ENTRIES, *CHANGING])
    print(f"{total} cases, {points} points, {bad_points} bad; entry points: {names}")
    return 1 if bad_points else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
