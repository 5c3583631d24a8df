"""docs/reference/errors.md: each class of errors has an anchor, its fields and a real text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.errors_page import PAGE, section_of

import torch_dcpx as dcpx
from torch_dcpx import errors
from torch_dcpx.errors import DcpxError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, DcpxError)
]


def test_the_page_has_a_heading_for_each_class_and_no_other() -> None:
    headings = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert headings[0] == "DcpxError"
    assert sorted(headings) == sorted(cls.__name__ for cls in CLASSES)


@pytest.mark.parametrize("cls", CLASSES[1:])
def test_each_class_has_its_bases_its_fields_and_a_text(cls: type[DcpxError]) -> None:
    section = section_of(cls.__name__)
    assert section.count("```text\n") == 1
    for base in cls.__bases__:
        assert base is DcpxError or f"`{base.__name__}`" in section
    for field in cls.__annotations__:
        assert f"`{field}`" in section
    named = set(re.findall(r"`(\w+)`", section.partition("Field")[2]))
    assert named <= set(cls.FIELDS)


class Evil:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def load_what_runs_a_command(path: str) -> None:
    dcp.save({"e": Evil()}, checkpoint_id=path, no_dist=True)
    dcpx.load({"e": None}, path)


def stage(tensor: torch.Tensor) -> None:
    dcpx.DcpxStager(host_memory_bytes=2 << 20).stage({"w": tensor})


TEXTS: dict[type[DcpxError], Callable[[str], object]] = {
    dcpx.OptionError: lambda _: dcpx.WriteOptions(workers=0),
    dcpx.MismatchError: lambda path: dcpx.load({"model": {"w": torch.ones(2)}}, path),
    dcpx.UnknownNameError: lambda path: dcpx.load_tensors(path, ["weight"]),
    dcpx.NotCommittedError: lambda _: dcpx.load({"w": torch.ones(2)}, "nowhere"),
    dcpx.UnsafePickleError: load_what_runs_a_command,
    dcpx.RepairError: dcpx.repair,
    dcpx.StagingError: lambda _: stage(torch.ones(1 << 20)),
    dcpx.UnsupportedError: lambda _: dcpx.save({"w": torch.ones(3, device="meta")}, "meta"),
}


@pytest.mark.parametrize("cls", TEXTS)
def test_the_printed_text_is_how_the_real_one_begins(
    cls: type[DcpxError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcpx.save({"w": torch.ones(2)}, "ckpt")
    with pytest.raises(cls) as caught:
        TEXTS[cls]("ckpt")
    (printed,) = re.findall(r"```text\n(.*?)\n```", section_of(cls.__name__), re.DOTALL)
    assert str(caught.value).startswith(printed)
