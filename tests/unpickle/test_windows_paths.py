"""Checkpoints that were made on Windows: a path is a PureWindowsPath, without an allowance."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path, PureWindowsPath

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_dcpx as dcpx

MODULES = ["pathlib", "pathlib._local"]  # the latter by Python 3.13


def as_windows(pickled: bytes, module: str) -> bytes:
    """Makes the PosixPath of a pickle of protocol 2 a WindowsPath."""
    posix = f"c{type(Path()).__module__}\nPosixPath\n".encode()
    made = pickled.replace(posix, f"c{module}\nWindowsPath\n".encode())
    assert made != pickled
    return made


@pytest.mark.parametrize("module", MODULES)
def test_path_in_the_metadata_keeps_nothing_from_loading(tmp_path: Path, module: str) -> None:
    path = tmp_path / "ckpt"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(as_windows(pickle.dumps(metadata, 2), module))
    assert torch.equal(dcpx.load_tensors(path)["w"], torch.ones(2))
    assert dcpx.verify(path).ok


@pytest.mark.parametrize("module", MODULES)
def test_value_of_a_file_is_a_pure_path(tmp_path: Path, module: str) -> None:
    torch.save({"w": torch.ones(2), "at": Path("C:\\", "data")}, tmp_path / "posix.pt")
    with (
        zipfile.ZipFile(tmp_path / "posix.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w") as new,
    ):
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, as_windows(data, module) if name.endswith("data.pkl") else data)
    with dcpx.open_checkpoint(tmp_path / "y.pt") as held:
        assert held.objects["at"] == PureWindowsPath("C:\\data")
        assert torch.equal(held["w"][...], torch.ones(2))
    dcpx.save({"at": PureWindowsPath("C:\\data")}, tmp_path / "again", no_dist=True)
    with dcpx.open_checkpoint(tmp_path / "again") as held:
        assert held.objects["at"] == PureWindowsPath("C:\\data")
