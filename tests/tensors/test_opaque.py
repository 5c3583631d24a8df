"""Tensors without sizes or memory that may be read: each save refuses them by name at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


MAKERS: dict[str, Any] = {
    "strided": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
}


def save_by_manager(state: dict[str, Any], path: Path, *, is_async: bool) -> None:
    with CheckpointManager(path, no_dist=True, async_save=is_async) as manager:
        manager.save(1, state=state)


WAYS: dict[str, Any] = {
    "save": lambda state, path: dcpx.save(state, path, no_dist=True),
    "async_save": lambda state, path: dcpx.async_save(state, path, no_dist=True).result(),
    "manager": lambda state, path: save_by_manager(state, path, is_async=False),
    "manager, async": lambda state, path: save_by_manager(state, path, is_async=True),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_tensor_without_memory_to_read_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    text = "the layout torch._mkldnn" if kind == "mkldnn" else "nested tensor, which has no sizes"
    for name, save in WAYS.items():
        with pytest.raises(UnsupportedError, match=rf"odd' is .*{text}"):
            save({"a": torch.ones(2), "odd": MAKERS[kind]()}, tmp_path / name)
        assert not list(tmp_path.rglob("*.distcp")), name
