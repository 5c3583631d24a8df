"""Processes of multiprocessing: which get the hook, and what a forkserver's do not learn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.machine import seconds

import torch_dcpx

PROGRAM = """
import multiprocessing, sys

def kind(queue):
    from torch.distributed.checkpoint import FileSystemWriter
    queue.put(type(FileSystemWriter("x")).__name__)

def made(how):
    context = multiprocessing.get_context(how)
    queue = context.SimpleQueue()
    process = context.Process(target=kind, args=(queue,))
    process.start()
    print(queue.get(), flush=True)
    process.join()

if __name__ == "__main__":
    import logging
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    import torch_dcpx
    for step in sys.argv[1:]:
        if step in ("fork", "spawn", "forkserver"):
            made(step)
        else:
            getattr(torch_dcpx, step)()
"""
OURS, STOCK, WARNED = "DcpxWriter", "FileSystemWriter", "WARNING"
STEPS: dict[str, list[str]] = {
    "install fork spawn forkserver": [OURS, OURS, OURS],
    "forkserver install forkserver install spawn": [STOCK, WARNED, STOCK, OURS],
    "install forkserver uninstall forkserver install": [OURS, WARNED, OURS],
}


@pytest.mark.usefixtures("hook_off", "entry_point")
@pytest.mark.parametrize("steps", STEPS)
def test_processes_get_the_hook_or_it_is_said_that_they_do_not(tmp_path: Path, steps: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program, *steps.split()],
        capture_output=True,
        text=True,
        timeout=seconds(300),
    )
    lines = [line for line in done.stdout.splitlines() if "made a writer" not in line]
    assert [line.split()[0] for line in lines] == STEPS[steps], (done.stdout, done.stderr)


# ---- When it is said -----------------------------------------------------------------------------


class Forkserver:
    """What `multiprocessing` knows of its own. Each test has other numbers: the hook notes them."""

    _forkserver_pid: int | None = None


@pytest.fixture
def forkserver(monkeypatch: pytest.MonkeyPatch) -> Forkserver:
    server = Forkserver()
    module = SimpleNamespace(_forkserver=server)
    monkeypatch.setitem(sys.modules, "multiprocessing.forkserver", module)
    return server


@pytest.fixture
def warned(hook_off: None, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Gives the warnings since the last call."""

    def taken() -> list[str]:
        texts = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        caplog.clear()
        return texts

    return taken


def test_forkserver_that_began_before_install(
    forkserver: Forkserver, warned: Callable[[], list[str]]
) -> None:
    forkserver._forkserver_pid = 7
    torch_dcpx.install()
    (text,) = warned()
    assert "process 7" in text and "without the hook" in text
    assert "DCPX_INSTALL=1" in text and "'spawn'" in text
    torch_dcpx.install()  # no change
    torch_dcpx.uninstall()  # it has what is now
    assert warned() == []
    with torch_dcpx.use():
        assert len(warned()) == 1
    assert warned() == []


def test_forkserver_that_began_behind_install(
    forkserver: Forkserver, warned: Callable[[], list[str]]
) -> None:
    torch_dcpx.install()
    forkserver._forkserver_pid = 17
    torch_dcpx.install(durability="full")
    (text,) = warned()
    assert ", with the hook:" in text
    torch_dcpx.install()
    assert warned() == []
    torch_dcpx.uninstall()
    assert len(warned()) == 1
    forkserver._forkserver_pid = 18  # the first one has ended
    torch_dcpx.install()
    (text,) = warned()
    assert "process 18" in text and "without the hook" in text


def test_forkserver_that_began_in_a_block(
    forkserver: Forkserver, warned: Callable[[], list[str]]
) -> None:
    with torch_dcpx.use():
        forkserver._forkserver_pid = 27
    (text,) = warned()
    assert ", with the hook:" in text


@pytest.mark.parametrize("module", [None, SimpleNamespace(), SimpleNamespace(_forkserver=None)])
def test_python_that_shows_no_forkserver_is_no_error(
    module: Any, monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setitem(sys.modules, "multiprocessing.forkserver", module)
    torch_dcpx.install()
    torch_dcpx.uninstall()
    assert warned() == []
