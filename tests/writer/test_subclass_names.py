"""Names in subclasses of the writer and reader: theirs, stock's, and none of ours in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import raises_one
from support.states import assert_same, blank_like

from torch_dcpx import DcpxReader, DcpxWriter

STATE = {"weight": torch.arange(60.0).view(6, 10), "step": 3}


def test_attributes_of_a_subclass_meet_none_of_ours(tmp_path: Path) -> None:
    """Names that a subclass of stock's writer or reader may use without a second thought."""
    names = {*dir(DcpxWriter(tmp_path)), *dir(DcpxReader(tmp_path))}
    mangled = ("_DcpxWriter__", "_DcpxReader__")
    own = {name.rsplit("__", 1)[1] for name in names if name.startswith(mangled)}
    assert {"locks", "save", "found", "release"} <= own

    class BusyWriter(DcpxWriter):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            vars(self).update({f"_{name}": object() for name in own})

    class BusyReader(DcpxReader):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            vars(self).update({f"_{name}": object() for name in own})

    dcp.save(STATE, storage_writer=BusyWriter(tmp_path), no_dist=True)
    target = blank_like(STATE)
    dcp.load(target, storage_reader=BusyReader(tmp_path), no_dist=True)
    assert_same(STATE, target)


@pytest.mark.parametrize("first", [False, True])
def test_metadata_exists_says_what_there_is_to_overwrite(tmp_path: Path, first: bool) -> None:
    class AnyWriter(DcpxWriter):
        def _metadata_exists(self) -> bool:
            return first

    writer = AnyWriter(tmp_path, overwrite=False)
    if first:
        with raises_one(RuntimeError):
            dcp.save(STATE, storage_writer=writer, no_dist=True)
    else:
        for _ in range(2):
            dcp.save(STATE, storage_writer=writer, no_dist=True)
