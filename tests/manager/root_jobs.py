"""Other jobs at a manager's root, as processes and as records, for tests."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from support.machine import seconds
from support.warm import WarmProcess, warm_parent

from torch_dcpx import CheckpointManager, DcpxError
from torch_dcpx import save as save_alone
from torch_dcpx.manager import removal
from torch_dcpx.storage import root_lock
from torch_dcpx.storage.holder import Holder
from torch_dcpx.storage.names import root_lock_name, root_lock_number
from torch_dcpx.storage.root_record import identity_of
from torch_dcpx.writer import commit

NEVER = 1e6
# Only what is proved counts: nobody is gone for his silence, and nobody is waited for.
PROOFS = {"_GONE_S": NEVER, "_ENDING_S": 0.0}


def started(
    function: Callable[..., None], *args: object, stdin: IO[Any] | None = None, out: Any = None
) -> WarmProcess:
    """Calls a function of this module with texts, in a process of its own."""
    code = f"import sys; sys.path[:0] = {sys.path!r}\nimport root_jobs\n"
    code += f"root_jobs.{function.__name__}(*sys.argv[1:])"
    out, err = out or sys.__stdout__, sys.__stderr__
    args = ("-c", code, *args)
    return warm_parent().start([*map(str, args)], out, err, env=os.environ, stdin=stdin)


class Job:
    """Another process with a manager, which does what it is told."""

    def __init__(self, root: Path, *flags: str, **values: float) -> None:
        reads, asks = os.pipe()
        answers, writes = os.pipe()
        self._asks, self._answers = os.fdopen(asks, "w"), os.fdopen(answers)
        told = json.dumps({**PROOFS, **values})
        with os.fdopen(reads) as stdin, os.fdopen(writes, "w") as out:
            self.process = started(obey, root, told, *flags, stdin=stdin, out=out)

    def tell(self, what: str) -> Any:
        late = threading.Timer(seconds(120), self.process.kill)
        late.start()
        try:
            self._asks.write(f"{what}\n")
            self._asks.flush()
            return json.loads(self._answers.readline())
        finally:
            late.cancel()

    def end(self) -> None:
        """Tells it no more, so that it ends by itself."""
        self._asks.close()
        assert self.process.wait(seconds(120)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(seconds(60))
        self._asks.close()
        self._answers.close()


def obey(root: str, values: str, *flags: str) -> None:
    """Does with a manager what standard input says, a line each."""
    for name, value in json.loads(values).items():
        setattr(root_lock, name, value)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "no flock")

    if "no-flock" in flags:
        fcntl.flock = refuse  # type: ignore[assignment]
    manager = manager_of(Path(root))
    for line in sys.stdin:
        what, _, value = line.strip().partition(" ")
        answer: Any = None
        try:
            if what == "save":
                save(manager, int(value))
            elif what == "resume":
                answer = manager.resume(state={"x": torch.ones(8)}).step
            elif what == "close":
                manager.close()
        except DcpxError as error:
            owner = getattr(error, "owner", None)
            answer = {"error": type(error).__name__, "text": str(error), "owner": owner}
        print(json.dumps(answer), flush=True)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(root: str, tag: str) -> None:
    commit.publish = _die  # type: ignore[assignment]
    manager_of(Path(root)).save(tag, step=2, state={"x": torch.ones(3)})


def die_in_own_save(root: str, tag: str) -> None:
    """As `die_in_save`, beneath a manager's root and without one."""
    commit.publish = _die  # type: ignore[assignment]
    save_alone({"x": torch.ones(3)}, Path(root) / tag, no_dist=True)


def die_in_delete(root: str, tag: str) -> None:
    removal._empty = _die  # type: ignore[assignment]
    manager_of(Path(root)).delete(tag)


def save_and_become_another(root: str) -> None:
    """Saves, and goes on as a program that knows nothing of it, until its standard input ends."""
    save(manager_of(Path(root)), 1)
    os.execvp("sh", ["sh", "-c", "echo done; cat"])


@contextmanager
def alarm() -> Iterator[None]:
    """Raises in the block, whatever it waits for, when it takes too long."""

    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds(60))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def manager_of(root: Path, **more: Any) -> CheckpointManager:
    return CheckpointManager(root, no_dist=True, **{"async_save": False, **more})


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, state={"x": torch.ones(8)})


def save_once(root: Path, step: int = 1) -> None:
    """Saves as a job does that ends behind it."""
    with manager_of(root) as manager:
        save(manager, step)


def locks(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if root_lock_number(path.name))


def elsewhere(**more: Any) -> Holder:
    """Returns the record of a job on another machine."""
    own = Holder.own("")._replace(host="node7", pid=4711, boot="another", space="pid:[1]")
    return own._replace(token="other", has_flock=True, **more)


def put(root: Path, holder: Holder, number: int = 1) -> None:
    """Writes a record of a root, unless its holder names another one."""
    beside = root.with_name(f"{root.name}.record")
    beside.write_bytes(holder._replace(root=holder.root or identity_of(root)).encoded())
    beside.rename(root / root_lock_name(number))  # nobody finds a half
