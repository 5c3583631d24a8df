"""A virtual environment with torch, this package and what they require, and nothing else.

Made of links into the environment that runs the tests: installing torch anew would take minutes.
"""

from __future__ import annotations

import os
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch_dcpx

_SCRIPTS = {"torchrun": "torch.distributed.run", "dcpx": "torch_dcpx.cli"}


def make_bare_venv(path: Path, *more: str) -> Path:
    """Makes it, with the distributions `more` besides. Returns the folder of its commands."""
    from packaging.requirements import Requirement

    venv.create(path, symlinks=True)
    site = path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    pyproject = Path(torch_dcpx.__file__).parents[1] / "pyproject.toml"
    wanted, done = [*requirements_of(pyproject), *more], set[str]()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in done or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        done.add(requirement.name)
        try:
            found = distribution(requirement.name)
        except PackageNotFoundError:  # such as nvidia's libraries beside a torch for the CPU
            continue
        wanted += found.requires or ()
        for top in {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    (site / "torch_dcpx").symlink_to(Path(torch_dcpx.__file__).parent)
    for name, module in _SCRIPTS.items():
        script = path / "bin" / name
        script.write_text(f"#!{path}/bin/python\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)
    return path / "bin"


def requirements_of(pyproject: Path) -> list[str]:
    """Returns the dependencies of the package, as its source or its distribution names them."""
    if not pyproject.exists():  # installed
        return [each for each in distribution("torch-dcpx").requires or () if "extra" not in each]
    text = pyproject.read_text().split("\ndependencies = [", 1)[1].split("]", 1)[0]
    return [each.strip().strip('"') for each in text.split(",") if each.strip()]


def environment_of(commands: Path) -> dict[str, str]:
    """Returns the environment of a shell in which it is active."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PATH": f"{commands}:/usr/bin:/bin", "VIRTUAL_ENV": str(commands.parent)}
