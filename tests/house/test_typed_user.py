"""The annotations of the public names, as users meet them: mypy --strict reads what users write."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from support.machine import seconds

import torch_dcpx

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("typed_user.py")
PACKAGES = Path(torch_dcpx.__file__).resolve().parents[1]


def test_users_script_passes_mypy_strict_and_a_wrong_name_does_not(tmp_path: Path) -> None:
    """In an empty directory. What mypy has learnt of torch stays in build/ for the next run."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch_dcpx\nprint(torch_dcpx.save({}, 'a').result().no_such_name)\n")
    paths = {} if PACKAGES.name == "site-packages" else {"MYPYPATH": str(PACKAGES)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / "build" / "mypy"),
         str(SCRIPT), str(wrong)],
        cwd=tmp_path, env={**os.environ, **paths},
        capture_output=True, text=True, timeout=seconds(600),
    )  # fmt: skip
    (line, summary) = done.stdout.splitlines()
    assert line.startswith("wrong.py:2: ") and 'has no attribute "no_such_name"' in line
    assert (done.returncode, done.stderr) == (1, "") and summary.startswith("Found 1 error")


def test_users_script_uses_every_public_name() -> None:
    used: set[str] = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dcpx":
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch_dcpx":
            used |= {alias.name for alias in node.names}
    assert used == set(torch_dcpx.__all__)
