"""Saves over a folder, each killed one step later: `folder_kill_worker.py ROOT`.

A step is a call that changes names. Prints one line of JSON: what was wrong, by step.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.folders import save_folder, value_in

PARTS = ("model", "optimizer")
STEPS = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.chmod"}
KILLED = 9


def save(folder: Path, value: float) -> None:
    save_folder(folder, value, parts=PARTS, files=("rest.txt",))


def values_in(folder: Path) -> set[float]:
    parts = {value_in(folder / part) for part in PARTS}
    return {*parts, float((folder / "rest.txt").read_text().split()[1])}


def users(folder: Path) -> dict[str, str]:
    """Returns what the user has in a folder, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        rel = str(path.relative_to(folder))
        if path.is_symlink():
            found[rel] = f"link to {path.readlink()}"
        elif "mine" in rel:
            found[rel] = "directory" if path.is_dir() else path.read_bytes().hex()[:200]
    return found


def fill(folder: Path) -> None:
    save(folder, 1)
    dcp.save({"mine": torch.ones(3)}, checkpoint_id=folder / "mine" / "step-1", no_dist=True)
    (folder / "mine" / "empty").mkdir()
    (folder / "mine.txt").write_text("mine")
    (folder / "model" / "mine.txt").write_text("mine, too")
    (folder / "mine-elsewhere").symlink_to("/proc", target_is_directory=True)


def in_child(call: Callable[[], Any]) -> int:
    """Makes a call in a child, for nobody may save in one of a process that has saved. Returns how
    the child has ended.
    """
    child = os.fork()
    if child == 0:
        try:
            call()
        except BaseException:  # noqa: BLE001 - told by the exit
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(step: int, call: Callable[[], Any]) -> None:
    """Makes a call, and ends the process before this step of it."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        is_exchange = event == "ctypes.dlsym" and "renameat2" in arguments
        if event in STEPS or is_exchange:
            seen += 1
            if seen == step:
                os._exit(KILLED)

    sys.addaudithook(hook)
    call()


def main() -> None:
    root = Path(sys.argv[1])
    wrong: dict[int, str] = {}
    assert in_child(lambda: fill(root / "template" / "a")) == 0
    (root / "template").rename(root / "0")  # of the same names each time
    expected = users(root / "0" / "a")
    for step in count(1):
        here = root / str(step)
        shutil.copytree(root / "0", here, symlinks=True)
        ended = in_child(partial(kill_at, step, partial(save, here / "a", 2)))
        if ended != KILLED:
            break
        values, found = values_in(here / "a"), users(here / "a")
        if values not in ({1.0}, {2.0}) or found != expected:
            wrong[step] = f"{values} {found}"
        assert in_child(partial(save, here / "a", 3)) == 0
        left = sorted(os.listdir(here))
        if values_in(here / "a") != {3.0} or users(here / "a") != expected or left != ["a"]:
            wrong[step] = f"later: {values_in(here / 'a')} {users(here / 'a')} {left}"
        shutil.rmtree(here)
    print(json.dumps({"steps": step - 1, "ended": ended, "wrong": wrong}))


if __name__ == "__main__":
    main()
