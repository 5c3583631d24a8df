"""Installs what was carried: the wheel of the package, and Python packages that are missing.

The package goes to a folder of its own (ON_GPU_SITE), the wheel of this Python from dist/wheels;
without one it is built here. Of build/on_gpu/wheels only what this Python lacks is installed.
Says which packages are then still missing, and what they are needed for.

    python tests/cuda/gpu_install.py --digest TREE     prints what carry.sh puts beside the wheel
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_carried import CARRIED, OPTIONAL, WHEELS

ROOT = Path(__file__).resolve().parents[2]
MADE_OF = "csrc.sha256"  # beside the wheel: what csrc and setup.py were for it


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


def install(site: Path, what: Sequence[str]) -> None:
    command = [
        *(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"),
        *("--disable-pip-version-check", "--root-user-action=ignore"),
        *("--upgrade", "--target", str(site), *what),
    ]
    print(" ".join(command[3:]), flush=True)
    subprocess.run(command, check=True)


def digest(tree: Path) -> str:
    """Returns what the extension is made of, as one number."""
    found = hashlib.sha256()
    for path in [tree / "setup.py", *sorted((tree / "csrc").rglob("*"))]:
        if path.is_file():
            found.update(f"{path.relative_to(tree)} {path.stat().st_size}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def strangers(site: Path, wheel: Path | None) -> list[str]:
    """Returns what of the package is not of the tree: its Python files, or all of its C++."""
    made_of = ROOT / "dist" / "wheels" / MADE_OF
    tree = ROOT / "torch_dcpx"
    others = [
        str(path.relative_to(tree))
        for path in sorted(tree.rglob("*.py"))
        if not (site / "torch_dcpx" / path.relative_to(tree)).is_file()
        or (site / "torch_dcpx" / path.relative_to(tree)).read_bytes() != path.read_bytes()
    ]
    if wheel and not (made_of.is_file() and made_of.read_text().split() == [digest(ROOT)]):
        others.append("csrc")
    return others


def main() -> int:
    site = Path(os.environ["ON_GPU_SITE"])
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    wheel = wheel_of("torch-dcpx", ROOT / "dist" / "wheels")
    if wheel is None:
        print("no wheel of this Python in dist/wheels (tests/cuda/carry.sh makes it): building")
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
    ours = [str(wheel)] if wheel else ["--no-build-isolation", str(ROOT)]
    install(site, [*ours, *found])
    figures = {"wheel": wheel.name if wheel else "built here", "missing": missing}
    figures["installed"] = [Path(one).name for one in found]
    print("FIGURES", json.dumps(figures))
    if others := strangers(site, wheel):
        print(f"REASON the wheel is of another tree, {others[0]} differs: make it anew (carry.sh)")
        return 1
    if needed := [name for name in missing if name in CARRIED]:
        print(
            f"REASON missing: {', '.join(needed)}; carry {WHEELS}, which tests/cuda/carry.sh makes"
        )
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--digest"]:
        print(digest(Path(sys.argv[2])))
    else:
        sys.exit(main())
