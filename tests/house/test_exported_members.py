"""The public names: sorted, complete, and each of them there."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

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
