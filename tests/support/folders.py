"""Folders of several checkpoints, saved as an adapter does, and what lies in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torch_dcpx.integrations._dcp_calls import noted
from torch_dcpx.integrations._folders import FolderSaves

RECORD = ".dcpx.folder"


def save_folder(
    folder: Path,
    value: float,
    *,
    parts: tuple[str, ...] = ("model",),
    files: tuple[str, ...] = (),
    condemned: Callable[[], list[Path]] = list,
    by: FolderSaves | None = None,
    **options: Any,
) -> None:
    """Saves a folder as a framework does; without `by` in a job of its own, to its end."""
    saves = by or FolderSaves("save", None)
    target = saves.begin(lambda: folder, **options)
    with saves.telling(), noted(target) as found:
        for part in parts:
            dcp.save({part: torch.full((8,), value)}, checkpoint_id=target / part)
        for name in files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(f"{name} {value}")
    saves.commit(found, condemned)
    if by is None:
        saves.wait()


def value_in(part: Path) -> float:
    state = {part.name: torch.zeros(8)}
    dcp.load(state, checkpoint_id=part, no_dist=True)
    return state[part.name][0].item()


def tree(folder: Path) -> dict[str, Any]:
    """Returns all that lies in a folder, by path: identity and status, and the content of files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        kept = (status.st_ino, stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode))
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        link = os.readlink(path) if path.is_symlink() else ""
        found[str(path.relative_to(folder))] = (*kept, status.st_uid, content, link)
    return found
