"""One of two ranks of test_error_texts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.saves import change, read_footer
from support.worker import rank_case
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import DcpxReader, DcpxWriter, errors

SAMPLES: dict[str, Any] = {
    "option": "workers", "value": 7, "fqn": "layer.weight", "errno": 28, "path": "/a/b",
    "offset": 1 << 40, "nbytes": 4096, "touched": ("a", "b.c"), "expected": "x", "found": "y",
    "global_name": "os.system", "owner": "host 1",
    "missing": ("a",), "left": ("b",), "shapes": {"b": ((1,), (2,))}, "dtypes": {"c": ("x", "y")},
    "kinds": {"d": "e"}, "nearest": {"a": "aa"}, "candidates": ("x",), "assumptions": ("y",),
    "is_good": True, "files": 4, "ranks": (1, 2), "waited_s": 2.5,
    "phases": ("writing", "planning"),
    "rank": 1, "host": "node1", "phase": "writing", "original": "builtins.KeyError",
}  # fmt: skip


def fields(error: BaseException) -> Any:
    assert isinstance(error, errors.DcpxError)
    values = [getattr(error, name) for name in error.FIELDS]
    return type(error), str(error), error.message, dict(zip(error.FIELDS, values, strict=True))


def failures(run: Any) -> dict[int, BaseException]:
    """Returns the error of each rank, as DCP ships them to this one."""
    with pytest.raises(CheckpointException) as caught:
        run()
    return {rank: failure[0] for rank, failure in caught.value.failures.items()}


class Fails(DefaultSavePlanner):
    """Raises `error` on rank 1."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def create_local_plan(self) -> Any:
        if dist.get_rank() == 1:
            raise self.error
        return super().create_local_plan()


def every_class(path: Path) -> None:
    for name, cls in vars(errors).items():
        if not (isinstance(cls, type) and issubclass(cls, errors.DcpxError)):
            continue
        error = cls(f"a {name}", **{field: SAMPLES[field] for field in cls.FIELDS})
        shipped = failures(
            lambda error=error: dcp.save(
                {"a": torch.ones(3)}, storage_writer=DcpxWriter(path), planner=Fails(error)
            )
        )
        assert set(shipped) == {1}
        assert fields(shipped[1]) == fields(error)
        dist.barrier()
    assert not (path / ".metadata").exists()


def damaged_file_of_one_rank(path: Path) -> None:
    rank = dist.get_rank()
    state = {f"own{rank}": torch.arange(50_000), "step": 3}

    def load() -> None:
        dcp.load({f"own{rank}": torch.zeros(50_000, dtype=torch.int64)},
                 storage_reader=DcpxReader(path))  # fmt: skip

    dcp.save(state, storage_writer=DcpxWriter(path))
    load()
    dist.barrier()
    file = path / "__1_0.distcp"
    row = read_footer(file).row("own1")
    if rank == 1:
        change(file, row.payload_offset + 70_000, b"\xff\xfe")
    dist.barrier()
    shipped = failures(load)
    assert set(shipped) == {1}
    error = shipped[1]
    assert isinstance(error, errors.CorruptionError)
    assert (error.fqn, error.path) == ("own1", str(file))
    assert error.offset is not None
    assert error.nbytes is not None
    assert error.offset <= row.payload_offset + 70_000 < error.offset + error.nbytes
    assert (error.expected is None) == (error.found is None)
    dist.barrier()


def bad_metadata_beside_good_ones(path: Path) -> None:
    """Every rank has its own good metadata, and the global one is bad: nobody may fall back."""
    rank = dist.get_rank()
    state = {"w": torch.arange(100), "step": rank}
    dcp.save(state, storage_writer=DcpxWriter(path), use_collectives=False)
    dist.barrier()
    target: dict[str, Any] = {"w": torch.zeros(100, dtype=torch.int64), "step": None}
    dcp.load(target, storage_reader=DcpxReader(path))
    assert target["step"] == rank
    dist.barrier()
    if rank == 0:
        (path / ".metadata").write_bytes(b"\x80\x04 this is no metadata")
    dist.barrier()
    shipped = failures(lambda: dcp.load(target, storage_reader=DcpxReader(path)))
    assert set(shipped) >= {0, 1}
    for error in shipped.values():
        assert isinstance(error, errors.CorruptionError)
        assert error.path == str(path / ".metadata")
    dist.barrier()


def metadata_of_one_rank_missing(path: Path) -> None:
    rank = dist.get_rank()
    dcp.save({"w": torch.arange(100)}, storage_writer=DcpxWriter(path), use_collectives=False)
    dist.barrier()
    if rank == 1:
        (path / "__1.metadata").unlink()
    dist.barrier()
    target = {"w": torch.zeros(100, dtype=torch.int64)}
    shipped = failures(lambda: dcp.load(target, storage_reader=DcpxReader(path)))
    assert set(shipped) == {1}
    assert isinstance(shipped[1], errors.NotCommittedError)
    assert shipped[1].path == str(path / "__1.metadata")
    assert "no '.metadata' and no '__1.metadata', but metadata of 1 other rank" in str(shipped[1])


@rank_case()
def main(root: Path) -> None:
    every_class(root / "classes")
    damaged_file_of_one_rank(root / "damaged")
    bad_metadata_beside_good_ones(root / "bad")
    metadata_of_one_rank_missing(root / "missing")
