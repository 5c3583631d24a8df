"""What a figure depends on besides the code: hardware, kernel, file system, versions.

No host name and no path: the page that shows it is public.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def describe_machine(folder: Path) -> dict[str, str | int]:
    """Returns the facts by name; `folder` is where the bench writes."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release().split("-")[0],
        "file_system": file_system(folder),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torch-dcpx", "safetensors")},
        "commit": _commit(),
    }


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def file_system(folder: Path) -> str:
    """Returns type and options of the mount that holds `folder`."""
    best: tuple[int, str] = (-1, "unknown")
    resolved = folder.resolve()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, kind, options, *_ = line.split()
        if resolved.is_relative_to(mount_point) and len(mount_point) >= best[0]:
            shown = [o for o in options.split(",") if o in ("discard", "noatime", "relatime")]
            best = (len(mount_point), " ".join([kind, *shown]))
    return best[1]


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip() or "unknown"
