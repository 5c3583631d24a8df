"""Prints the lines of requirements files whose packages are not installed, whatever the version.

For environments that bring their own packages (`make test VENV=`): nothing there is replaced.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path


def is_installed(requirement: str) -> bool:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    lines = [line.strip() for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    missing = [line for line in lines if line and line[0] != "#" and not is_installed(line)]
    sys.stdout.write("".join(f"{line}\n" for line in missing))
