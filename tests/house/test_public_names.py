"""The public names: sorted, complete, and each of them there."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine import seconds

import torch_dcpx
from torch_dcpx import errors


def _names_imported_for_type_checkers() -> set[str]:
    """Returns what `if TYPE_CHECKING:` imports: what mypy and editors believe is exported."""
    tree = ast.parse(Path(torch_dcpx.__file__).read_text())
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        alias.asname or alias.name
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_all_is_sorted_and_free_of_duplicates() -> None:
    assert torch_dcpx.__all__ == sorted(set(torch_dcpx.__all__))


def test_every_exported_name_loads() -> None:
    for name in torch_dcpx.__all__:
        assert getattr(torch_dcpx, name) is not None
        assert name in dir(torch_dcpx)


def test_every_error_class_is_exported() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.DcpxError)
    }
    assert len(classes) > 1
    assert classes <= set(torch_dcpx.__all__)


def test_type_checkers_and_runtime_agree_on_the_exported_names() -> None:
    assert _names_imported_for_type_checkers() == set(torch_dcpx.__all__)


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch_dcpx.no_such_name


# ---- Their annotations: mypy --strict reads what users write -------------------------------------


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
