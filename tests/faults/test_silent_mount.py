"""A file system whose server stops: what waits for it raises, goes on, or is interrupted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_alone
from support.machine import seconds

import torch_dcpx
from torch_dcpx import CheckpointManager, StorageError
from torch_dcpx._answered_os import path_of
from torch_dcpx.artifacts import files, writing
from torch_dcpx.storage.place import PosixPlace
from torch_dcpx.storage.publish import put

BOUND_S = 2.0
pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPX_EXIT_TIMEOUT_S", "5")
    for name in ("DCPX_SAVE_TIMEOUT_S", "DCPX_LOAD_TIMEOUT_S"):
        monkeypatch.setenv(name, str(BOUND_S))


@contextmanager
def mounted(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A FUSE mount (bindfs) for the block, and the process that answers for it."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is missing: apt-get install bindfs")
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no FUSE here (/dev/fuse)")
    stored, where = tmp_path / "stored", tmp_path / "fuse"
    stored.mkdir()
    where.mkdir()
    command = ["setpriv", "--pdeathsig", "KILL", "bindfs", "-f", str(stored), str(where)]
    with subprocess.Popen(command) as daemon:
        try:
            while str(where) not in Path("/proc/self/mountinfo").read_text():
                assert daemon.poll() is None
                time.sleep(0.01)
            yield where, daemon.pid
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
            daemon.terminate()
            daemon.wait(seconds(30))
            subprocess.run(["umount", "--lazy", str(where)], check=False, capture_output=True)


def state_of(seed: int) -> dict[str, Any]:
    return {"large": torch.full((4 << 20,), float(seed)), "step": seed}


Begin = Callable[[], object]


class Mount:
    """What is done on a mount whose daemon is stopped."""

    def __init__(self, where: Path, daemon: int) -> None:
        self.where, self.path, self._daemon = where, where / "ckpt", daemon
        self._undo: list[Callable[[], object]] = []
        self.targets: list[torch.Tensor] = []  # of loads that failed
        (where / "config").mkdir()
        (where / "config" / "config.json").write_text("{}")
        torch_dcpx.save(state_of(1), self.path, no_dist=True)
        manager = CheckpointManager(where / "root", no_dist=True)
        manager.save(1, model=torch.nn.Linear(2, 2))
        manager.wait()
        self.operations: dict[str, Callable[[], object]] = {
            "save": lambda: torch_dcpx.save(state_of(2), self.path, no_dist=True),
            "load": self.load,
            "verify": lambda: torch_dcpx.verify(self.path),
            "ls": lambda: torch_dcpx.ls(where),
            "resume": lambda: manager.resume(model=torch.nn.Linear(2, 2)),
            "export": lambda: self._export({"large": state_of(3)["large"]}, "exported"),
            "export of what is stored": lambda: self._export(self.path, "stored"),
            "small file": lambda: put(where / "small" / "file", b"small"),
            "adapter's look": lambda: path_of(where / "small").is_dir(),
        }

    def load(self) -> None:
        target = state_of(0)
        try:
            torch_dcpx.load(target, self.path, no_dist=True)
        except BaseException:
            target["large"].fill_(9.0)  # it is the caller's again
            self.targets.append(target["large"])
            raise
        assert target["large"].eq(target["step"]).all()

    def _export(self, source: Any, name: str) -> None:
        """Exports beside a config that lies there, too."""
        config = self.where / "config"
        torch_dcpx.export(source, self.where / name, overwrite=True, no_dist=True, config=config)

    def stop(self) -> None:
        os.kill(self._daemon, signal.SIGSTOP)

    def _stopping(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (self.stop(), call(*args, **kwargs))[1]

    def within(self, job: str) -> Begin:
        """Lets the daemon stop only where C++ begins to read or write."""
        real = getattr(PosixPlace, job)

        def made(place: Any, options: Any) -> Any:
            setattr(PosixPlace, job, real)
            found = real(place, options)
            for name in ("write", "read", "sum"):
                if hasattr(found, name):
                    vars(found)[name] = self._stopping(getattr(found, name))
            return found

        return lambda: setattr(PosixPlace, job, made)

    def within_range_job(self, call: str) -> Begin:
        """Lets the daemon stop only where an export begins to write, or to sync."""
        real = files.open_job

        def made(*args: Any) -> Any:
            found = real(*args)
            vars(found)[call] = self._stopping(getattr(found, call))
            return found

        def put_in(job: Any) -> None:
            for module in (files, writing):
                vars(module)["open_job"] = job

        self._undo.append(lambda: put_in(real))
        return lambda: put_in(made)

    def go_on(self) -> None:
        os.kill(self._daemon, signal.SIGCONT)

    def works(self, name: str) -> None:
        self.go_on()
        while self._undo:
            self._undo.pop()()
        self.operations[name]()

    def check_silent(self, name: str, begin: Begin) -> None:
        """Checks that an operation raises when the daemon is stopped, and works afterwards."""
        began = time.monotonic()
        begin()
        with pytest.raises(StorageError, match="no answer for") as caught:
            self.operations[name]()
        assert caught.value.errno == errno.ETIMEDOUT, name
        assert str(self.where) in str(caught.value.path), name
        assert time.monotonic() - began < BOUND_S + seconds(20), name
        self.works(name)

    def check_interrupted(self, name: str, begin: Begin) -> None:
        """Checks that Ctrl-C ends an operation at once, and the next one works."""
        pressed_at: list[float] = []

        def press() -> None:
            pressed_at.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        begin()
        threading.Timer(1.0, press).start()
        with pytest.raises(KeyboardInterrupt):
            self.operations[name]()
        assert time.monotonic() - pressed_at[0] < seconds(20), name
        self.works(name)


def operations_on_a_silent_mount(where: Path, daemon: int) -> None:
    """The last one leaves a thread behind: the process ends all the same."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mount = Mount(where, daemon)
    for name in mount.operations:
        mount.check_silent(name, mount.stop)
    for name, job in (("save", "write_job"), ("load", "read_job"), ("verify", "verify_job")):
        mount.check_silent(name, mount.within(job))
    names = {name for name in os.listdir(mount.path) if name.endswith(".distcp")}
    assert len(names) == 1, names  # the files of what was left behind are gone
    exports = ("export", "export of what is stored")
    for call in ("write", "finish"):
        for name in exports:
            mount.check_silent(name, mount.within_range_job(call))
    assert [name for name in os.listdir(where / "exported") if name.startswith(".")] == []
    os.environ |= {"DCPX_SAVE_TIMEOUT_S": "1000", "DCPX_LOAD_TIMEOUT_S": "1000"}
    mount.check_interrupted("load", mount.stop)
    mount.check_interrupted("export", mount.stop)
    for name in exports:
        mount.check_interrupted(name, mount.within_range_job("write"))
    assert all(target.eq(9.0).all() for target in mount.targets), "what was left behind wrote"
    mount.stop()
    threading.Timer(1.0, mount.go_on).start()
    mount.load()
    mount.stop()
    raise SystemExit  # and so the process ends


def test_operations_on_a_mount_without_answers_raise_go_on_or_are_interrupted(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path) as (where, daemon):
        run_alone(operations_on_a_silent_mount, where, daemon, deadline_s=300)


def mount_after_the_import(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20)}
    torch_dcpx.save(state, tmp_path / "local", no_dist=True)
    with mounted(tmp_path) as (where, daemon):
        torch_dcpx.save(state, where / "ckpt", no_dist=True)
        os.kill(daemon, signal.SIGSTOP)
        for call in (torch_dcpx.save, torch_dcpx.load):
            with pytest.raises(StorageError, match="no answer for") as caught:
                call(state, where / "ckpt", no_dist=True)
            assert f"'{where}/ckpt" in str(caught.value)


def test_mount_that_is_made_after_the_import_is_bounded_once_a_save_has_seen_it(
    tmp_path: Path,
) -> None:
    run_alone(mount_after_the_import, tmp_path, deadline_s=90)
