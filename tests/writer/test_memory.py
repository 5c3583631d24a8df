"""Host memory of saves and loads is bounded by an argument; an item may have more than 4 GiB."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import READERS, save
from support.warm import WarmParent

MIB = 1 << 20
STATE_MIB = 192

PRELUDE = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions, WriteOptions

MIB = 1 << 20
path, state_mib = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def measured(job):
    job()  # once before: what stays after the first use is no growth
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = resident("VmRSS")
    job()
    print((resident("VmHWM") - before) // MIB)
"""

SAVE = (
    PRELUDE
    + """
numel = state_mib * MIB // 4 // 24
state = {f"t{i}": torch.full((numel,), float(i)) for i in range(24)}
if sys.argv[3] == "strided":  # every tensor must be gathered
    state = {key: value[: numel // 2 * 2].view(-1, 2)[:, :1] for key, value in state.items()}
class Planner(DefaultSavePlanner):
    def transform_object(self, item, value):
        return value.clone() if sys.argv[3] == "temporaries" and value.dim() else value
options = WriteOptions(host_memory_bytes=32 * MIB, durability="none")
measured(lambda: dcp.save(
    state, storage_writer=DcpxWriter(path, options=options), planner=Planner(), no_dist=True))
"""
)

LOAD = (
    PRELUDE
    + """
numel = state_mib * MIB // 4 // 24
state = {f"t{i}": torch.full((numel,), float(i)) for i in range(24)}
dcp.save(state, storage_writer=DcpxWriter(path), no_dist=True)
if sys.argv[3] == "converted":  # every tensor is staged, then cast
    state = {key: value.to(torch.int32) for key, value in state.items()}
class Planner(DefaultLoadPlanner):
    def resolve_tensor(self, item):
        target = super().resolve_tensor(item)
        return torch.empty_like(target) if sys.argv[3] == "temporaries" else target
    def commit_tensor(self, item, tensor):
        if sys.argv[3] == "temporaries":
            self.lookup_tensor(item.dest_index).copy_(tensor)
options = ReadOptions(host_memory_bytes=32 * MIB)
measured(lambda: dcp.load(
    state, storage_reader=DcpxReader(path, options=options), planner=Planner(), no_dist=True))
assert all((value == i).all() for i, value in enumerate(state.values()))
"""
)


# glibc raises the size from which a block has its own mapping when one is freed, and then keeps
# freed tensors of a planner in its heap: fixed, so that what is resident is what is alive.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@pytest.fixture(scope="module")
def exact() -> Iterator[WarmParent]:
    parent = WarmParent(EXACT)
    yield parent
    parent.close()


def grown_mib(parent: WarmParent, code: str, path: Path, kind: str) -> int:
    """Returns by how much the resident size of a process of its own grew at most."""
    command = ["-c", code, str(path), str(STATE_MIB), kind]
    result = parent.run(command, env={**os.environ, **EXACT})
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


# The bound is 32 MiB of slots and 32 MiB of temporaries; one item of 8 MiB may be alive besides
# the window that is full, and Python's own objects take a little.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "strided", "temporaries"])
def test_a_save_stays_within_its_budget(tmp_path: Path, exact: WarmParent, kind: str) -> None:
    grown = grown_mib(exact, SAVE, tmp_path / "ckpt", kind)
    assert grown <= 32 + 32 + 8 + 8, f"{grown} MiB for a state of {STATE_MIB} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "converted", "temporaries"])
def test_a_load_stays_within_its_budget(tmp_path: Path, exact: WarmParent, kind: str) -> None:
    grown = grown_mib(exact, LOAD, tmp_path / "ckpt", kind)
    assert grown <= 32 + 32 + 8 + 8, f"{grown} MiB for a state of {STATE_MIB} MiB"


LARGE_BYTES = 2**32 + 12_345
CHUNK_BYTES = 16 << 20
TILE = torch.randint(
    0, 256, (CHUNK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)


def chunks() -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (offset, bytes) of what the tensor holds; no two chunks are the same."""
    for number, offset in enumerate(range(0, LARGE_BYTES, CHUNK_BYTES)):
        tile = TILE.roll(number * 4099)
        yield offset, tile[: LARGE_BYTES - offset]


def state(is_filled: bool) -> dict[str, Any]:
    """The large tensor, and small ones before and behind it in the file."""
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    if is_filled:
        for offset, expected in chunks():
            large[offset : offset + len(expected)] = expected
    small = torch.arange(5.0) if is_filled else torch.zeros(5)
    return {"a": small, "large": large, "z": small + 1}


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_tensor_of_more_than_4_gib_comes_back_bit_for_bit(tmp_path: Path, writer: str) -> None:
    try:
        save(state(is_filled=True), tmp_path / "ckpt", writer, sync_files=False)
        assert max(path.stat().st_size for path in (tmp_path / "ckpt").iterdir()) > 2**32
        for reader in READERS if writer == "ours" else ("ours",):
            found = state(is_filled=False)
            dcp.load(found, storage_reader=READERS[reader](tmp_path / "ckpt"), no_dist=True)
            for offset, expected in chunks():
                assert torch.equal(found["large"][offset : offset + len(expected)], expected)
            assert torch.equal(found["a"], torch.arange(5.0))
            assert torch.equal(found["z"], torch.arange(5.0) + 1)
    finally:
        shutil.rmtree(tmp_path / "ckpt")
