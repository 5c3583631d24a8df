"""One client of a distributed file system that is a directory of this machine: a FUSE daemon.

    python fuse_daemon.py MOUNT DIRECTORY ADDRESS

Several daemons on one DIRECTORY are several clients: each shows it at its MOUNT, keeps what it saw
as such a client does, and takes orders (the methods of `Orders`) by a socket of ADDRESS. Root only.

What it plays, and where that was seen (strace and calls of os on Debian 12's packages):
- Names and attributes are kept by the kernel for 1 s (`name_s`, `attributes_s`), missing names
  not at all (`missing_s`). GlusterFS 10.3: a size first seen at 0 B stays 0 for 1.01 s in stat,
  open, fstat and read; what lists a directory has seen the sizes of its files.
- A file that another client has replaced or removed opens for as long as its name is kept. The
  open asks nobody (open-behind); the first read, write, fsync, fstat or close says ESTALE. A
  descriptor that has read before goes on. GlusterFS 10.3.
- A directory that another client has replaced: its descriptor gives ESTALE for listings, fstat,
  mkdir and create, ENOENT for opens, nothing for fsync; its path works. GlusterFS 10.3.
- A part that is down (`down`): listings leave its files out, look-ups say ENOENT, creating and
  renaming there ENOTCONN, as do all calls on what was open; directories are there, mkdir works.
  GlusterFS 10.3, three bricks without replicas, one killed.
- Other numbers for the same: sshfs 3.7.3 keeps sizes and listings for 20 s (`kept_s`), MooseFS
  3.0.117 sizes not at all and what was in a replaced directory for 1 s; there, and with CephFS
  16.2, which keeps nothing, the descriptor of a replaced directory gives ENOENT (`gone`).
- Locks of both kinds are seen by all clients, and free as soon as their process is killed.
  GlusterFS 10.3. `locks="local"`: each mount has its own, as sshfs, s3fs and rclone.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import fuse_wire as wire
from fuse_nodes import GoneError
from fuse_rules import Rules
from fuse_tree import Tree

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
_NO_ANSWER = ("forget", "batch_forget", "interrupt")
_SETTINGS = ("name_s", "attributes_s", "missing_s", "kept_s", "kept_missing_s")


class Daemon:
    """Serves one mount: each thread takes the next request."""

    def __init__(self, device: int, directory: str, has_locks: bool) -> None:
        self._device, self._has_locks = device, has_locks
        self.rules = Rules(self.begin_thread)
        self.tree = Tree(directory, self.rules)

    def begin_thread(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                request = wire.parsed(os.read(self._device, wire.BUFFER_BYTES))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue  # ENOENT: the caller was interrupted before this was read
                os._exit(0)  # ENODEV: unmounted
            if request.operation in _NO_ANSWER:
                self.tree.note(request)
                continue
            try:
                if request.operation == "init":
                    body = wire.init_answer(request, self._has_locks)
                else:
                    body = self.tree.answer(request)
                message = wire.answer(request.unique, body)
            except OSError as error:
                message = wire.answer(request.unique, failed=error.errno or errno.EIO)
            except Exception:  # noqa: BLE001 -- a mistake here: nobody is to wait for its answer
                traceback.print_exc()
                message = wire.answer(request.unique, failed=errno.EIO)
            self._send(message)

    def _send(self, message: bytes) -> None:
        try:
            os.write(self._device, message)
        except OSError as error:
            if error.errno == errno.ENODEV:
                os._exit(0)
            if error.errno != errno.ENOENT:  # that: the caller was killed, or nothing was kept
                raise

    # ---- Orders ---------------------------------------------------------------------------------

    def obey(self, connection: socket.socket) -> None:
        """Takes orders until the other end closes: a line of JSON each, its name and arguments.

        Each is answered by a line, the text of an error or "", and the result.
        """
        orders: dict[str, Callable[..., Any]] = {
            "set": self.set,
            "forget": self.forget,
            "gone": self.say_gone,
            "fail": self.rules.fail,
            "hold": self.rules.hold,
            "release": self.rules.release,
            "down": self.rules.take_down,
            "clear": self.rules.clear,
            "calls": self.rules.calls,
            "held": self.rules.held,
        }
        lines = connection.makefile("rw")
        for line in lines:
            name, arguments = json.loads(line)
            answer: tuple[str, Any]
            try:
                answer = "", orders[name](**arguments)
            except (KeyError, TypeError, ValueError, OSError) as error:
                answer = repr(error), None
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

    def set(self, **settings: float) -> None:
        """Sets for how many seconds what is seen from now on is kept."""
        for name, seconds in settings.items():
            if name not in _SETTINGS:
                raise ValueError(f"{name}: expected one of {_SETTINGS}")
            setattr(self.tree, name, float(seconds))

    def say_gone(self, code: int) -> None:
        """Sets the error of what another client has taken away."""
        GoneError.code = code

    def forget(self) -> None:
        """Ends all that is kept, here and in the kernel: the time is over. Not while a request
        that makes or looks up a name is held: the kernel holds its directory.
        """
        nodes, names = self.tree.forget_all()
        for node in nodes:
            self._send(wire.stale_node(node))
        for node, name in names:
            self._send(wire.stale_name(node, name))


def main(where: str, directory: str, address: str, locks: str) -> None:
    """Serves until the mount, or the process that started this one, has gone."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)
    listener.listen()
    daemon = Daemon(wire.mount(where), directory, locks == "shared")
    for _ in range(4):
        daemon.begin_thread()
    print("mounted", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=daemon.obey, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    os.umask(0)  # the caller's is in the modes already
    main(*sys.argv[1:])
