"""What a bare machine may lack: Python packages that are carried there as wheels.

Printed as a script, one a line, for carry.sh.
"""

from __future__ import annotations

#: Where their wheels lie, in the tree.
WHEELS = "build/on_gpu/wheels"

#: Package: what needs it. Without one of these a stage cannot run.
CARRIED = {
    "numpy": "torch's collectives on objects",
    "click": "dcpx doctor",
    "rich": "dcpx doctor",
    "markdown-it-py": "rich",
    "mdurl": "rich",
    "pygments": "rich, pytest",
    "pytest": "the tests",
    "pluggy": "pytest",
    "iniconfig": "pytest",
    "packaging": "pytest",
    "pytest-timeout": "the tests",
    "pytest-xdist": "the tests",
    "execnet": "pytest-xdist",
    "hypothesis": "tests/conftest.py",
    "sortedcontainers": "hypothesis",
}
#: Without one of these a side of a comparison is left out.
OPTIONAL = {
    "safetensors": "its side of save.py and load.py",
    "tqdm": "save.py",
    "torch-checkpointing": "its stager beside ours",
}


if __name__ == "__main__":
    print("\n".join([*CARRIED, *OPTIONAL]))
