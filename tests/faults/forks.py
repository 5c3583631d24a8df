"""One process imports torch once, and each case runs in a child that it forks: nothing that a case
does to its process (limits, signals, filters of system calls, another directory) outlives it.

    def cases(root: Path) -> Rows: ...          # at the top of the test's own module
    assert_none_bad(run_alone(cases, tmp_path))  # in a process that can fork by `in_child`
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.call_shim import preloaded
from support.machine import seconds
from support.warm import warm_parent

from torch_dcpx.errors import DcpxError

_PATHS = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
_SERVE = f"import sys; sys.path[:0] = {_PATHS}; import forks; forks.serve(sys.argv[1])"
DEADLINE_S = seconds(60)
Rows = list[tuple[str, str]]  # cases, and what is bad, or ""


class Ended(NamedTuple):
    """How a child ended."""

    code: int  # exit code, or the negative number of the signal
    said: dict[str, Any]  # {"value": ...}, or {"raised": type's name, ...}; {} if it said nothing

    @property
    def is_hung(self) -> bool:
        """Whether it was killed at its deadline."""
        return bool(self.said.get("is_hung"))

    def unless(self, is_well: object) -> str:
        """Returns "" or, for a table, how it ended."""
        return "" if is_well else str(self)


def unwrapped(error: BaseException) -> BaseException:
    """Returns the error that DCP's CheckpointException is around, or this one."""
    while getattr(error, "failures", None):
        error = next(iter(error.failures.values()))[0]  # type: ignore[attr-defined]
    return error


def _said_by(body: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": body()}
    except BaseException as caught:  # noqa: BLE001  (told to the parent)
        error = unwrapped(caught)
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


def run_alone(
    function: Callable[..., Any],
    *args: Any,
    library: Path | None = None,
    under: Sequence[str] = (),
    deadline_s: float = 1150,
) -> Any:
    """Returns what a function of a module returns in a process of its own, which has one thread.

    The process does not end as Python does, unless the function raises SystemExit.

    Args:
        library: the shim (call_shim) that the process is behind; None: none.
        under: with a library, the command that starts the process.
    """
    file = sys.modules[function.__module__].__file__
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "call").write_bytes(pickle.dumps((file, function.__name__, args)))
        command = ["-c", _SERVE, folder]
        result: subprocess.CompletedProcess[str]
        if library is None:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            result = warm_parent().run(command, env=env, timeout_s=seconds(deadline_s))
        else:
            env = {**preloaded(library), "OMP_NUM_THREADS": "1"}
            result = subprocess.run(
                [*under, sys.executable, *command], env=env, capture_output=True, text=True,
                timeout=seconds(deadline_s), check=False,
            )  # fmt: skip
        said = f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
        assert result.returncode == 0, f"{function.__name__}: {result.returncode}\n{said}"
        print(said)
        return pickle.loads((Path(folder) / "answer").read_bytes())


def serve(folder: str) -> None:
    """Makes the call. A collection in a child would write to all that was imported: 0.15 s each."""
    file, name, args = pickle.loads((Path(folder) / "call").read_bytes())
    sys.path.insert(0, os.path.dirname(file))
    function = getattr(importlib.import_module(Path(file).stem), name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answer, leave = None, os._exit
    try:
        answer = function(*args)
    except SystemExit:
        leave = sys.exit
    (Path(folder) / "answer").write_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    leave(0)


def assert_none_bad(rows: Rows) -> None:
    """Asserts that there are cases, and none is bad; prints how many of each kind there are."""
    assert rows
    bad = [f"{case}: {text}" for case, text in rows if text]
    print(f"{len(rows)} cases, bad = {len(bad)}")
    assert not bad, "\n\n".join(bad[:20])
