"""An item of more than 4 GiB: zip64, offsets and lengths that no 32 bits hold."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import READERS, save

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
