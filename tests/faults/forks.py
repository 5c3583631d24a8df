"""One process imports torch once, and each case runs in a child that it forks: nothing that a case
does to its process (limits, signals, filters of system calls, another directory) outlives it.

A driver calls `alone` before anything else, `in_child` a case, and notes it in a `Table`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.machine import seconds

from torch_dcpx.errors import DcpxError

TESTS = Path(__file__).resolve().parents[1]
DEADLINE_S = seconds(60)


class Ended(NamedTuple):
    """How a child ended."""

    code: int  # exit code, or the negative number of the signal
    said: dict[str, Any]  # {"value": ...}, or {"raised": type's name, ...}; {} if it said nothing

    @property
    def is_hung(self) -> bool:
        """Whether it was killed at its deadline."""
        return bool(self.said.get("is_hung"))


def alone() -> None:
    """Makes this a process that can fork: no pool of threads, and nobody reads its warnings.

    A collection in a child would write to all that was imported, and take 0.15 s and more.
    """
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def _said_by(body: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": body()}
    except BaseException as error:  # noqa: BLE001  (told to the driver)
        while getattr(error, "failures", None):  # DCP's CheckpointException
            error = next(iter(error.failures.values()))[0]  # type: ignore[attr-defined]
        return {
            "raised": type(error).__name__,
            "is_typed": isinstance(error, DcpxError),
            "text": str(error),
            "errno": getattr(error, "errno", None),
            "trace": "".join(traceback.format_exception(error))[-6000:],
        }


def in_child(body: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Ended:
    """Runs `body` in a child: what it returned (JSON), what it raised, or how it was ended."""
    return in_children([body], deadline_s)[0]


def in_children(bodies: list[Callable[[], Any]], deadline_s: float = DEADLINE_S) -> list[Ended]:
    """Runs each of `bodies` in a child of its own, all at the same time; returns their ends."""
    sys.stdout.flush()
    children = [_started(body) for body in bodies]
    give_up_at = time.monotonic() + deadline_s
    return [_ended(*child, give_up_at) for child in children]


def _started(body: Callable[[], Any]) -> tuple[int, int]:
    """Returns a child's pid, and where what it says comes out."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_end)
            said = json.dumps(_said_by(body)).encode()
            while said:
                said = said[os.write(write_end, said) :]
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    return child, read_end


def _ended(child: int, read_end: int, give_up_at: float) -> Ended:
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    is_hung = not poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000)
    if is_hung:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(watched)
    with os.fdopen(read_end, "rb") as said_there:
        os.set_blocking(said_there.fileno(), False)
        text = said_there.read() or b""
    if is_hung:
        return Ended(code, {"is_hung": True})
    try:
        return Ended(code, json.loads(text))
    except ValueError:
        return Ended(code, {})


class Table:
    """Cases and what was wrong with them; printed as JSON for the test that started the driver."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []  # group, case, "" or what is bad

    def add(self, group: str, case: object, bad: str | None) -> None:
        self.rows.append((group, str(case), bad or ""))

    def print(self) -> None:
        sys.stdout.write(json.dumps(self.rows) + "\n")
        sys.stdout.flush()


def table_of(
    worker: Path, *args: str, timeout_s: float = 1150, environment: dict[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """Runs a driver and returns its table; prints how many cases each group has, and how many bad.

    Raises:
        AssertionError: it failed, or had no case.
    """
    import torch_dcpx

    root = Path(torch_dcpx.__file__).parents[1]
    path = f"{TESTS}:{TESTS / 'faults'}:{root}"
    result = subprocess.run(
        [sys.executable, str(worker), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds(timeout_s),
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return counted(json.loads(result.stdout.splitlines()[-1]))


def counted(table: list[list[str]]) -> list[tuple[str, str, str]]:
    """Prints how many cases each group of a driver's table has, and how many are bad.

    Returns:
        The rows. Raises AssertionError: there is none.
    """
    rows = [(group, case, bad) for group, case, bad in table]
    assert rows
    for group in dict.fromkeys(group for group, _, _ in rows):
        bads = [bool(bad) for name, _, bad in rows if name == group]
        print(f"{group:<40} {len(bads):>4} cases, bad = {sum(bads)}")
    print(f"{'in all':<40} {len(rows):>4} cases, bad = {sum(bool(bad) for *_, bad in rows)}")
    return rows


def assert_none_bad(rows: list[tuple[str, str, str]]) -> None:
    bad = [f"{group}, {case}: {text}" for group, case, text in rows if text]
    assert not bad, "\n\n".join(bad[:20])
