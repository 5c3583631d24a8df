"""How much more host memory this process can get, of the machine and its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class Available(NamedTuple):
    """Host memory that this process can still get."""

    nbytes: int | None  # None: nothing is known to bound it
    source: str  # of the bound


def available_memory(
    proc: str | Path = "/proc", cgroups: str | Path = "/sys/fs/cgroup"
) -> Available:
    """Returns the least memory that the machine or a control group above this process has left.

    Memory that the kernel can drop at once (clean cache) counts as available, in a group as well.
    `proc` and `cgroups` (version 1 or 2) are mount points.
    """
    kib = _named_number(Path(proc) / "meminfo", "MemAvailable:")
    bounds = [Available(None if kib is None else kib << 10, "MemAvailable")]
    for folder, names in _groups(Path(proc), Path(cgroups)):
        bounds.append(Available(_left(folder, names), str(folder / names[0])))
    known = [bound for bound in bounds if bound.nbytes is not None]
    return min(known, key=lambda bound: bound.nbytes or 0) if known else Available(None, "")


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
    cached = _named_number(folder / "memory.stat", names[2]) or 0
    return max(0, limit - used + min(cached, used))


def _named_number(path: Path, name: str) -> int | None:
    """Returns the number that stands behind a name, in a file of such lines."""
    for line in _text(path).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # missing, or not ours to read: then no bound is known
        return ""
