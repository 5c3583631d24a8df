"""Loads whole checkpoints into fresh memory and compares them bit for bit."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


class Comparison(NamedTuple):
    """What two states have in common, and the names of what they have not."""

    tensors: int
    tensor_bytes: int
    values: int
    mismatches: list[str]

    def __str__(self) -> str:
        if self.mismatches:
            return f"NOT equal, {len(self.mismatches)} entries: {', '.join(self.mismatches[:5])}"
        return (
            f"{self.tensors} tensors ({self.tensor_bytes:,} B) and {self.values} Python values "
            "equal bit for bit"
        )


def raw_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor as they lie in memory: [bytes], uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def load_fresh(reader: dcp.FileSystemReader, fill: int) -> dict[str, Any]:
    """Returns every entry of a checkpoint by its flat name; `fill` is in the memory before.

    Loads that use different fills cannot agree on a byte that one of them never read.
    """
    state: dict[str, Any] = {}
    for fqn, entry in reader.read_metadata().state_dict_metadata.items():
        state[fqn] = None  # dcp.load replaces it, where it is a Python value
        if isinstance(entry, TensorStorageMetadata):
            state[fqn] = torch.empty(entry.size, dtype=entry.properties.dtype)
            raw_bytes(state[fqn]).fill_(fill)
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def is_same(left: Any, right: Any) -> bool:
    """Whether two values have the same types and the same bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(raw_bytes(left), raw_bytes(right))
        )
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


def compare(left: dict[str, Any], right: dict[str, Any]) -> Comparison:
    """Compares two flat states, tensor by tensor and value by value."""
    tensors = [value for value in left.values() if isinstance(value, Tensor)]
    mismatches = [
        name
        for name in sorted(left.keys() | right.keys())
        if name not in left or name not in right or not is_same(left[name], right[name])
    ]
    return Comparison(
        len(tensors), sum(t.nbytes for t in tensors), len(left) - len(tensors), mismatches
    )


def size_on_disk(checkpoint: Path) -> int:
    """Returns the bytes of all files of a checkpoint directory."""
    return sum(path.stat().st_size for path in checkpoint.iterdir())
