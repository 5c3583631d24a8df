"""Cuts the power of a small disk before the calls of a save, and looks at what is there then.

A process of its own (`cut`), behind the shim (call_shim.py) and in a mount namespace of its own, so
that nothing stays mounted however it ends. For each point
1. the image of a disk that was prepared is copied and mounted;
2. a child saves, and at the n-th changing call the file system is shut down and the child killed.
   Where no call is the n-th, it is cut right after the save returned;
3. the disk is unmounted, and mounted again, which replays its journal;
4. another child loads what is there, by our reader and by stock's, and saves twice more.
This process itself opens nothing on the disk.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from call_sweep import rank_local
from cut_saves import MUTANTS, NEVER, NEW, NEXT, OLD, SCENARIOS, by_us, of
from forks import in_child, run_alone, unwrapped
from support.call_shim import Action, Kind, Shim, compiled
from support.machine import EVERY_POINT, seconds
from support.saves import READERS, load
from support.states import assert_same
from torch.distributed.checkpoint.api import CheckpointException

from torch_dcpx.storage import directory
from torch_dcpx.storage import save_lock as lock
from torch_dcpx.storage.names import is_metadata_name
from torch_dcpx.writer.commit import referenced_files

FILE_SYSTEMS = ["ext4", "xfs"]
MODES = {1: "journal flushed", 2: "journal not flushed"}  # of FS_IOC_SHUTDOWN
TIMEOUT_S = 3000 if EVERY_POINT else 1150
MIB = {"ext4": 32, "xfs": 300}  # the least that mkfs.xfs makes; the file is sparse
MKFS = {"ext4": ["mkfs.ext4", "-q", "-m0"], "xfs": ["mkfs.xfs", "-q"]}
LEFT_OUT = "no fsync of "
FSYNCS = Kind.DIR_FSYNC | Kind.FILE_FSYNC


# ---- The disk -----------------------------------------------------------------------------------


class Disk:
    """One file system in a file, made from copies of images that were prepared."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Makes an empty one in memory, for it has to be quick: what is cut is the loop device."""
        self.images, self.where = folder / "images", folder / "disk"
        self.images.mkdir()
        self.where.mkdir()
        run("mount", "-t", "tmpfs", "tmpfs", self.images)
        made = self.images / "made"
        with made.open("wb") as file:
            file.truncate(MIB[kind] << 20)
        run(*MKFS[kind], made)
        self.copy(made, self.images / "empty")

    @staticmethod
    def copy(image: Path, to: Path) -> None:
        run("cp", "--sparse=always", image, to)

    def prepare(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Returns an image that `fill` has filled; made once."""
        image = self.images / name.replace(" ", "-")
        if not image.exists():
            self.copy(self.images / "empty", image)
            self.mount(image)
            told_by(lambda: fill(self.where))
            self.unmount()
        return image

    def mount(self, image: Path) -> None:
        run("mount", "-o", "loop", image, self.where)

    def unmount(self) -> None:
        run("umount", self.where)


def run(*command: str | Path) -> None:
    plain = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    subprocess.run(command, check=True, timeout=seconds(60), env=plain)


def told_by(act: Callable[[], Any], code: int = 0) -> Any:
    """Returns what `act` returns in a child, which ends with `code`."""
    ended = in_child(act, seconds(600))
    assert ended.code == code and ("value" in ended.said or code), ended
    return ended.said.get("value")


# ---- One sweep ----------------------------------------------------------------------------------


class Sweep:
    """The cuts of one scenario, one mutant or none, one way of shutting down."""

    def __init__(self, shim: Shim, disk: Disk, asked: dict[str, Any]) -> None:
        self.shim, self.disk, self.mode = shim, disk, asked["mode"]
        self.mutant: str | None = asked.get("mutant")
        self.left_out: int | None = None  # which of the fsyncs
        self.scenario = SCENARIOS[asked["scenario"]]
        self.ckpt = disk.where / "a" / "b" / "ckpt"
        self.image = disk.prepare(asked["scenario"], lambda _: self.scenario.prepare(self.ckpt))

        self.calls = self._calls()
        if self.mutant and self.mutant.startswith(LEFT_OUT):
            kinds = fsyncs_of(self.calls)
            self.left_out = kinds.index(self.mutant.removeprefix(LEFT_OUT))

    def _calls(self) -> list[tuple[str, str]]:
        """Returns what a save that is not cut calls, and on what."""
        self._mount_copy()
        found = told_by(lambda: (self._save(NEVER), self.shim.calls())[1])
        self.disk.unmount()
        return [(name, path) for name, path in found]

    def _mount_copy(self) -> None:
        copy = self.disk.images / "now"
        self.disk.copy(self.image, copy)
        self.disk.mount(copy)

    def _save(self, nth: int) -> None:
        self.shim.watch(self.disk.where)
        if self.left_out is not None:
            self.shim.drop(self.left_out, FSYNCS)
        elif self.mutant in MUTANTS:
            MUTANTS[self.mutant](self.ckpt)
        self.shim.arm(nth, Action.POWER, self.mode)
        self.scenario.save(self.ckpt)

    def _save_and_cut(self, nth: int) -> Any:
        self._save(nth)
        os.write(self.told, b"1")  # it has returned
        self.shim.arm(0, Action.POWER, self.mode)
        os.rmdir(self.disk.where / "none")

    def cut(self, nth: int) -> tuple[bool, str]:
        """Returns whether the save had returned before the cut, and what was found after it."""
        self._mount_copy()
        reading, self.told = os.pipe()
        try:
            told_by(lambda: self._save_and_cut(nth), -signal.SIGKILL)
        finally:
            os.close(self.told)
            has_returned = os.read(reading, 1) == b"1"
            os.close(reading)
        self.disk.unmount()
        self.disk.mount(self.disk.images / "now")
        found = told_by(lambda: found_in(self.ckpt, is_local=self.scenario.is_local))
        self.disk.unmount()
        return has_returned, found

    def is_bad(self, has_returned: bool, found: str) -> bool:
        return found not in (("new",) if has_returned else (self.scenario.before, "new"))


def fsyncs_of(calls: list[tuple[str, str]]) -> list[str]:
    """Returns of what each fsync of a save is, in order."""
    commit = next(n for n, (name, _) in enumerate(calls) if name.startswith("rename"))
    ckpt = calls[commit][1].rpartition("/")[0]
    kinds = []
    for n, (name, path) in enumerate(calls):
        if name != "fsync":
            continue
        if path == ckpt:
            kinds.append("the new names" if n < commit else "the rename")
        elif path.endswith((".distcp", ".tmp")):
            kinds.append("a data file" if path.endswith(".distcp") else "the metadata")
        else:
            kinds.append(f"the parent {path or '/'}")
    return kinds


def found_in(ckpt: Path, *, is_local: bool) -> str:
    """Returns "none", "old", "new", or what is wrong with what is there, or with the next saves."""
    there = ""
    try:
        there = loaded_from(ckpt)
        lock.boot_id = lambda: "the next one"
        for state in (NEXT, OLD):  # what the cut left behind goes with the second one at the latest
            (of(rank_local, state) if is_local else by_us(state))(ckpt)
            assert_same(state, load(state, ckpt))
        assert_no_leftovers(ckpt)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - what is wrong is told
        return f"{there}, but the next save: {one_line(error)}" if there else one_line(error)
    return there


def loaded_from(ckpt: Path) -> str:
    if not list(ckpt.glob("*.metadata")):
        return "none"
    steps = []
    for reader in READERS:
        loaded = load(OLD, ckpt, reader)
        assert_same(OLD if loaded["step"] == 0 else NEW, loaded)
        steps.append(loaded["step"])
    assert steps[0] == steps[1], steps
    return "old" if steps[0] == 0 else "new"


def assert_no_leftovers(ckpt: Path) -> None:
    """Asserts that there is metadata, what it names, and locks."""
    with directory.Directory(ckpt) as opened:
        names = {name for name in opened.names() if not name.endswith(".lock")}
        metadata = {name for name in names if is_metadata_name(name)}
        assert len(metadata) == 1, names
        assert names - metadata == referenced_files(opened, *metadata), names


def one_line(error: BaseException) -> str:
    error = unwrapped(error)
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def sweep(shim: Shim, disk: Disk, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the points of a sweep.

    Args:
        asked: scenario, mode (of FS_IOC_SHUTDOWN: 1 flushes the journal, 2 does not), mutant or
            none, and of the points, which are the calls and the return: "first", "stride",
            "ends" (besides them, the first call and the last) and "after" (a call's name, those
            before and at which are left out), or "end" alone.
    """
    cuts = Sweep(shim, disk, asked)
    begin = next((n for n, call in enumerate(cuts.calls) if call[0] == asked.get("after")), -1) + 1
    stride = asked.get("stride", 1)
    numbers = list(range(begin + asked.get("first", 0), len(cuts.calls), stride))
    if asked.get("ends"):
        numbers = sorted({begin, *numbers, len(cuts.calls) - 1})
    points = []
    for nth in [*(() if asked.get("end") else numbers), NEVER]:
        has_returned, found = cuts.cut(nth)
        at = "the end" if has_returned else " ".join(cuts.calls[nth])  # or near it: threads
        points.append([nth, at, found, cuts.is_bad(has_returned, found)])
    return {**asked, "points": points}


def sweeps_of(library: Path, folder: Path, kind: str, sweeps: list[Any]) -> list[Any]:
    warm = folder / "warm"
    for number, scenario in enumerate(SCENARIOS.values()):  # imports what is imported late
        ckpt = warm / str(number) / "a" / "b" / "ckpt"
        ckpt.parents[2].mkdir(parents=True)
        scenario.prepare(ckpt)
        scenario.save(ckpt)
        loaded_from(ckpt)
    shutil.rmtree(warm)
    shim, disk = Shim(library), Disk(folder, kind)
    return [sweep(shim, disk, asked) for asked in sweeps]


def cut(folder: Path, kind: str, sweeps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the sweeps (`sweep`) with their points: [call, its name, found, is bad].

    Prints a line for each: file system, way of cutting, save, points, bad ones.
    """
    for tool, package in (("mkfs.ext4", "e2fsprogs"), ("mkfs.xfs", "xfsprogs")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install {package}")
    if not Path("/dev/loop-control").exists():
        pytest.skip("there are no loop devices (/dev/loop-control)")
    library = compiled(folder)
    under = ["unshare", "--mount", "--propagation", "private"]
    arguments = library, folder.resolve(), kind, sweeps
    found: list[dict[str, Any]] = run_alone(
        sweeps_of, *arguments, library=library, under=under, deadline_s=TIMEOUT_S
    )
    for one in found:
        bad = [point for point in one["points"] if point[3]]
        mode, mutant = MODES[one["mode"]], one.get("mutant") or "-"
        print(kind, mode, one["scenario"], mutant, len(one["points"]), bad[:3], sep=", ")
    return found
