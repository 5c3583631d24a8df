"""Lays the bytes of an export out: tensors to files, files to a header and payloads.

The layout is made before any rank writes. A payload is the tensor in C order, so that strides give
the place of each part, on any rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torch_dcpx._compat import dtype_by_name
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.reader.safetensors_header import (
    LENGTH_BYTES,
    MAX_FILE_TENSORS,
    MAX_HEADER_BYTES,
    NOTES_NAME,
    HeaderEntry,
    encode_header,
)


class ExportTensor(NamedTuple):
    """A tensor of the artifact."""

    name: str
    dtype: str  # torch's name
    sizes: tuple[int, ...]
    aliases: tuple[str, ...] = ()  # other names of the same memory

    @property
    def itemsize(self) -> int:
        dtype = dtype_by_name(self.dtype)
        return 1 if dtype is None else dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize


class OutputPlan(NamedTuple):
    """One file."""

    name: str  # after the rename
    nbytes: int
    head: bytes  # its first bytes, if they do not depend on the payloads


class Payload(NamedTuple):
    """The place of a tensor's bytes."""

    file: int
    offset: int
    nbytes: int


class Layout(NamedTuple):
    """All files of an artifact."""

    files: tuple[OutputPlan, ...]
    payloads: tuple[Payload, ...]  # of each tensor


def safetensors_layout(
    tensors: Sequence[ExportTensor], stem: str, max_shard_bytes: int, notes: Mapping[str, str]
) -> Layout:
    """Returns the files of safetensors, shards named as by Hugging Face.

    Tensors fill the files in order. A file holds `max_shard_bytes` of them, or one larger tensor,
    and no more tensors than our readers take. Each header has the `notes`.

    Raises:
        UnsupportedError: a header is longer than readers take.
    """
    shards: list[list[int]] = [[]]
    held = 0
    for number, tensor in enumerate(tensors):
        is_full = held + tensor.nbytes > max_shard_bytes or len(shards[-1]) >= MAX_FILE_TENSORS
        if shards[-1] and is_full:
            shards.append([])
            held = 0
        shards[-1].append(number)
        held += tensor.nbytes
    count = len(shards)
    payloads = [Payload(0, 0, 0)] * len(tensors)
    files = []
    for file, shard in enumerate(shards):
        part = f"-{file + 1:05}-of-{count:05}" if count > 1 else ""
        name = f"{stem}{part}.safetensors"
        # As the format's own writer: wide elements first, so that all are aligned.
        shard.sort(key=lambda i: (-tensors[i].itemsize, tensors[i].name))
        rows, at = [], 0
        for i in shard:
            tensor = tensors[i]
            end = at + tensor.nbytes
            rows.append(HeaderEntry(tensor.name, tensor.dtype, tensor.sizes, at, end))
            at = end
        # As safetensors.torch.save_model notes them.
        aliases = {alias: tensors[i].name for i in shard for alias in tensors[i].aliases}
        head = encode_header(rows, {**notes, **aliases, "format": "pt"})
        if len(head) - LENGTH_BYTES > MAX_HEADER_BYTES:
            raise UnsupportedError(
                f"the header of '{name}', of {len(rows)} tensors, is {len(head) - LENGTH_BYTES} B "
                f"long, and safetensors reads at most {MAX_HEADER_BYTES}: lower max_shard_bytes"
            )
        for i, row in zip(shard, rows, strict=True):
            payloads[i] = Payload(file, len(head) + row.begin, row.end - row.begin)
        files.append(OutputPlan(name, len(head) + at, head))
    return Layout(tuple(files), tuple(payloads))


def index_of(tensors: Sequence[ExportTensor], layout: Layout) -> bytes:
    """Returns the index of several files, as Hugging Face writes it."""
    weight_map = {
        tensor.name: layout.files[payload.file].name
        for tensor, payload in zip(tensors, layout.payloads, strict=True)
    }
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def file_view(tensor: ExportTensor) -> torch.Tensor:
    """Returns a tensor without memory whose strides are the payload's."""
    dtype = dtype_by_name(tensor.dtype)
    return torch.empty(tensor.sizes, dtype=dtype, device="meta")


def is_quantized(dtype: str) -> bool:
    """Returns whether the dtype has scales beside the bytes, which no format holds."""
    return dtype.startswith(("qint", "quint"))


def is_name(name: str) -> bool:
    """Returns whether a header can hold a tensor of this name: UTF-8, and not that of notes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return name != NOTES_NAME
