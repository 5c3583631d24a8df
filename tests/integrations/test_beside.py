"""Files that a framework has beside a checkpoint are of the checkpoint that is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dcpx as dcpx
from torch_dcpx import DcpxWriter, WriteOptions
from torch_dcpx.integrations._beside import WriterWithFiles, _Beside, current

NAME = "meta.pt"


def save(path: Path, content: bytes) -> None:
    def files(_: Path) -> Mapping[str, bytes]:
        return {NAME: content}

    writer = WriterWithFiles(path, files, WriteOptions())
    state = {"w": torch.full((4,), float(content[0]))}
    writer.saved_by(dcpx.save, state, no_dist=True).result()


def killed_before_its_commit(path: Path, content: bytes) -> None:
    """What a save leaves that ends between its file's rename and the commit."""
    _Beside(path / NAME, content).publish()


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if NAME in each.name)


def test_file_is_that_of_the_checkpoint_that_is_there_however_many_saves_are_killed(
    tmp_path: Path,
) -> None:
    save(tmp_path, b"1")
    for content in (b"2", b"3"):
        killed_before_its_commit(tmp_path, content)
        assert (tmp_path / NAME).read_bytes() == content
        assert current(tmp_path / NAME).read_bytes() == b"1"
    save(tmp_path, b"4")
    assert current(tmp_path / NAME) == tmp_path / NAME
    assert (tmp_path / NAME).read_bytes() == b"4" and names(tmp_path) == [NAME]


@pytest.mark.parametrize("is_there", [True, False])
def test_save_that_fails_at_its_commit_takes_its_file_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    if is_there:
        save(tmp_path, b"1")

    def fails(*_: Any) -> None:
        raise OSError(28, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(DcpxWriter, "finish", fails)
        with pytest.raises(Exception, match="no room"):
            save(tmp_path, b"2")
    assert names(tmp_path) == [NAME] * is_there
    if is_there:
        assert (tmp_path / NAME).read_bytes() == b"1"
    save(tmp_path, b"3")
    assert (tmp_path / NAME).read_bytes() == b"3" and names(tmp_path) == [NAME]
