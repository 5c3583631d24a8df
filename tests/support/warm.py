"""Processes that have imported torch: forks of one that did so once, 2 to 3 s each time less.

As a module it starts that process, and asks it for children that become a script or a snippet as
a fresh `python` would: their own arguments, environment, directory, output and end. It has one
thread and has staged, saved and loaded nothing. What the dynamic linker, the allocator or OpenMP
read when a process starts is of the parent, so tests of those, and of imports, start a fresh one.

    python warm.py SOCKET    serves until the other end is closed
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

IMPORTED = [
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch_dcpx.reader.reader", "torch_dcpx.writer.writer", "torch_dcpx.checkpoint.load"),
]
_MESSAGE_BYTES = 1 << 17


class WarmProcess:
    """A child, with what tests use of `subprocess.Popen`."""

    def __init__(self, parent: WarmParent, pid: int, args: Sequence[str]) -> None:
        self._parent, self.pid, self.args = parent, pid, list(args)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns its exit status, the negative number of the signal, or None: it still runs."""
        if self.returncode is None:
            self._parent.hear(0)
            self.returncode = self._parent.ended.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired: it has not ended after `timeout` seconds."""
        give_up_at = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > give_up_at:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._parent.hear(0.1)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmParent:
    """The process that forks. Not thread-safe."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        from support.machine import seconds  # here: the script below starts without `support`

        # Measured now at the latest: all children inherit it, and none measures for itself.
        self._start_s, self._close_s = seconds(120), seconds(60)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self.ended: dict[int, int] = {}  # exit statuses that nobody has asked for
        self._started: list[int] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self, timeout_s: float) -> None:
        """Notes what the parent says within this time."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            said = self._socket.recv(_MESSAGE_BYTES)
            assert said, "the process that forks has ended"
            kind, pid, code = json.loads(said)
            if kind == "started":
                self._started.append(pid)
            else:
                self.ended[pid] = code
            timeout_s = 0

    def start(
        self,
        args: Sequence[str],
        stdout: IO[Any],
        stderr: IO[Any],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        stdin: IO[Any] | None = None,
    ) -> WarmProcess:
        """Forks a child.

        Args:
            args: what would follow `python`: a script or `-c` and code, and its arguments.
            stdout: a file with a descriptor; `stderr` too.
            env: all of its environment.
            cwd: its directory; None: this process's.
            stdin: a file with a descriptor; None: /dev/null.
        """
        asked = {"args": list(args), "env": dict(env), "cwd": os.fspath(cwd or os.getcwd())}
        with open(os.devnull) as nothing:
            files = [(stdin or nothing).fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._socket, [json.dumps(asked).encode()], files)
        give_up_at = time.monotonic() + self._start_s
        while not self._started:
            assert time.monotonic() < give_up_at, "the process that forks does not answer"
            self.hear(1.0)
        return WarmProcess(self, self._started.pop(), args)

    def run(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        timeout_s: float = 600,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a child to its end, killed after `timeout_s`; returns its status and output."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = self.start(args, out, err, env=env, cwd=cwd)
            try:
                process.wait(timeout_s)
            finally:
                process.kill()
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        assert process.returncode is not None
        return subprocess.CompletedProcess(process.args, process.returncode, *texts)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(self._close_s)


@functools.cache
def warm_parent() -> WarmParent:
    """Returns the one of this session; conftest starts and closes it."""
    return WarmParent()


# ---- In the process that forks ------------------------------------------------------------------


def _serve(asks: socket.socket) -> dict[str, Any] | None:
    """Returns in a child what it is to become, in the parent None when nobody asks any more."""
    children: dict[int, int] = {}  # pidfd -> pid
    poll = select.poll()
    poll.register(asks, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                pid = children.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                asks.send(json.dumps(["ended", pid, code]).encode())
                continue
            said, files, _, _ = socket.recv_fds(asks, _MESSAGE_BYTES, 3)
            if not said:
                return None
            child = os.fork()
            if child == 0:
                asks.close()
                for other in children:
                    os.close(other)
                return {**json.loads(said), "files": files}
            for file in files:
                os.close(file)
            watched = os.pidfd_open(child)
            children[watched] = child
            poll.register(watched, select.POLLIN)
            asks.send(json.dumps(["started", child, 0]).encode())


def _become(asked: dict[str, Any]) -> tuple[str, str, types.ModuleType]:
    """Makes this child what was asked for; returns its code, its name and its `__main__`."""
    for target, file in enumerate(asked["files"]):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    name, *args = asked["args"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    first = os.path.dirname(name)
    if name == "-c":
        code, name, first = args.pop(0), "<string>", ""
    else:
        with open(name, encoding="utf-8") as script:
            code = script.read()
        main.__file__ = name
    sys.argv = [name if first else "-c", *args]
    more = [path for path in asked["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [first, *(path for path in more if path not in sys.path)]
    return code, name, main


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: a script's own takes its place
    for _module in IMPORTED:
        importlib.import_module(_module)
    # A child's collection as it ends would write to all of this: 0.6 s of its 0.9.
    gc.collect()
    gc.freeze()
    _asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _asked is None:
        os._exit(0)
    _code, _name, _main = _become(_asked)
    exec(compile(_code, _name, "exec"), _main.__dict__)
