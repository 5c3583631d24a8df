"""Installs what was carried: the wheel of the package, and Python packages that are missing.

The package goes to a folder of its own (ON_GPU_SITE), the wheel of this Python from dist/wheels;
without one it is built here. Of build/on_gpu/wheels only what this Python lacks is installed.
Says which packages are then still missing, and what they are needed for.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_carried import CARRIED, OPTIONAL, WHEELS

ROOT = Path(__file__).resolve().parents[2]


def has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def wheel_of(package: str, folder: Path) -> Path | None:
    """Returns the carried wheel of a package that this Python takes."""
    tag = "cp" + "".join(platform.python_version_tuple()[:2])
    for path in sorted(folder.glob(f"{package.replace('-', '_')}-*.whl")):
        python, abi, machine = path.stem.split("-")[-3:]
        is_ours = tag in python.split(".") or "py3" in python.split(".") or abi == "abi3"
        if is_ours and (machine == "any" or platform.machine() in machine):
            return path
    return None


def install(site: Path, *what: str) -> None:
    command = [
        *(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"),
        *("--disable-pip-version-check", "--root-user-action=ignore", "--no-compile"),
        *("--upgrade", "--target", str(site), *what),
    ]
    print(" ".join(command[3:]), flush=True)
    subprocess.run(command, check=True)


def strangers(site: Path) -> list[str]:
    """Returns the package's Python files that are not those of the tree."""
    tree = ROOT / "torch_dcpx"
    return [
        str(path.relative_to(tree))
        for path in sorted(tree.rglob("*.py"))
        if not (site / "torch_dcpx" / path.relative_to(tree)).is_file()
        or (site / "torch_dcpx" / path.relative_to(tree)).read_bytes() != path.read_bytes()
    ]


def main() -> int:
    site = Path(os.environ["ON_GPU_SITE"])
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    wheel = wheel_of("torch-dcpx", ROOT / "dist" / "wheels")
    if wheel is None:
        print("no wheel of this Python in dist/wheels (tests/cuda/carry.sh makes it): building")
        install(site, "--no-build-isolation", str(ROOT))
    else:
        install(site, str(wheel))
    found, missing = [], []
    for package, purpose in {**CARRIED, **OPTIONAL}.items():
        if has(package):
            continue
        carried = wheel_of(package, ROOT / WHEELS)
        if carried is not None:
            found.append(str(carried))
        else:
            missing.append(package)
            print(f"missing: {package}, for {purpose}")
    if found:
        install(site, *found)
    figures = {"wheel": wheel.name if wheel else "built here", "missing": missing}
    figures["installed"] = [Path(one).name for one in found]
    print("FIGURES", json.dumps(figures))
    if others := strangers(site):
        print(f"REASON the wheel is of another tree, {others[0]} differs: make it anew (carry.sh)")
        return 1
    if needed := [name for name in missing if name in CARRIED]:
        print(
            f"REASON missing: {', '.join(needed)}; carry {WHEELS}, which tests/cuda/carry.sh makes"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
