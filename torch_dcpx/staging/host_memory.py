"""Tells how much more host memory this process can get: the machine's and its control groups'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Available(NamedTuple):
    """Bytes that can still be had, and where the bound was found; bytes are None where none was."""

    nbytes: int | None
    source: str


def available_memory(
    proc: str | Path = "/proc", cgroups: str | Path = "/sys/fs/cgroup"
) -> Available:
    """Returns the least of what the machine and each control group above this process have left.

    What the kernel can drop at once (clean cache) counts as available, in a group as well.

    Args:
        proc: where procfs is mounted.
        cgroups: where the hierarchies of control groups are mounted, version 1 or 2.
    """
    found = [Available(_machine(Path(proc)), "MemAvailable")]
    for folder, names in _groups(Path(proc), Path(cgroups)):
        found.append(Available(_left(folder, names), str(folder / names[0])))
    known = [bound for bound in found if bound.nbytes is not None]
    return min(known, key=lambda bound: bound.nbytes or 0) if known else Available(None, "")


def _machine(proc: Path) -> int | None:
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields the folders of this process' groups, innermost first, and the names of their files."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        # In a container the path may be the host's: then only the root is there.
        folder = root / path.lstrip("/")
        while folder != root and root in folder.parents:
            yield folder, names
            folder = folder.parent
        yield root, names


def _left(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit, used = _number(folder / names[0]), _number(folder / names[1])
    if limit is None or used is None or limit >= 1 << 62:
        return None
    cached = 0
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == names[2]:
            cached = int(value)
    return max(0, limit - used + min(cached, used))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not there, or not ours to read: it bounds nothing that we know of
        return ""
