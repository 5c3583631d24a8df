"""Commands for shells of tests: `dcpx` and `python`, forked from a process that imported torch.

The fixture `commands` is a folder for PATH. A command in it hands its arguments, environment,
directory and open files to a process of warm.py, which becomes `dcpx` or the script, and ends as
that one does. Where the hook is asked for, which sees imports, `python` is the real one.

    python warm_commands.py SOCKET    serves them, until it is killed
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DCPX = """
import os, sys
from torch_dcpx.cli import main
try:
    main()
except SystemExit as ended:
    sys.stdout.flush()
    os._exit(ended.code or 0)
"""
_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
is_script = bool(args) and (args[0] == "-c" or args[0].endswith(".py"))
if name == "python" and (not is_script or os.environ.get("DCPX_INSTALL")):
    os.execv({python!r}, [{python!r}, *args])
if name == "dcpx":
    args = ["-c", {dcpx!r}, *args]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
    asks.connect({socket!r})
    asked = {{"args": args, "env": dict(os.environ), "cwd": os.getcwd()}}
    socket.send_fds(asks, [json.dumps(asked).encode()], [0, 1, 2])
    code = int(asks.recv(100) or 255)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def make_commands(folder: Path) -> tuple[Any, Path]:
    """Starts the process that serves; returns it, and the folder of the commands."""
    from support.warm import warm_parent

    place = folder / "socket"
    for name in ("dcpx", "python"):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(_COMMAND.format(python=sys.executable, socket=str(place), dcpx=_DCPX))
        path.chmod(0o755)
    read_end, write_end = os.pipe()
    with open(read_end) as said, open(write_end, "w") as out:
        process = warm_parent().start([__file__, str(place)], out, sys.__stderr__, env=os.environ)
        out.close()
        assert said.readline() == "ready\n"
    return process, folder / "bin"


def _serve(place: str) -> dict[str, Any]:
    """Returns in each child what it is to become."""
    import torch_dcpx.cli.app  # noqa: F401 - once for all

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(place)
    listening.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        asks, _ = listening.accept()
        if os.fork():
            asks.close()
            continue
        listening.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        said, files, _, _ = socket.recv_fds(asks, 1 << 17, 3)
        child = os.fork()
        if child == 0:
            asks.close()
            return {**json.loads(said), "files": files}
        for file in files:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        asks.send(str(code).encode())
        os._exit(0)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent)]
    from warm import _become

    sys.path.pop(0)
    _code, _name, _main = _become(_serve(sys.argv[1]))
    exec(compile(_code, _name, "exec"), _main.__dict__)
else:
    import pytest

    @pytest.fixture(scope="module")
    def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """A folder of commands for PATH, which start at once."""
        process, folder = make_commands(tmp_path_factory.mktemp("commands"))
        yield folder
        process.kill()
        process.wait(60)
