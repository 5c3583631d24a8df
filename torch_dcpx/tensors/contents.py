"""Do several ranks hold equal tensors under one name? Compares hashes of their contents.

A tensor of up to 4 KiB is looked at whole. Of a larger one samples of 64 B are, 1 every 4 KiB, but
32 at least and 1,024 at most, at places that its size alone decides: that finds contents that
differ nearly everywhere, as those of two experts do, in a hundredth of the time that a save takes.
It does not find a few elements. Layouts do not matter, nor do the bits of NaNs and zeros' signs.

No digest has what has no strides or no memory: a sparse or quantized tensor, one on "meta".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from torch_dcpx._native import _C
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import PLAIN_CLASSES, check_storage, has_strides

_BATCH = 128  # samples that are copied at once: 8 MiB at most
# Dtypes of numbers whose bits are not the number, as NaN has many and 0 has two: bytes of a part,
# and the greatest magnitude that is a number.
_FORMS = {
    torch.float64: (8, 0x7FF0_0000_0000_0000),
    torch.float32: (4, 0x7F80_0000),
    torch.float16: (2, 0x7C00),
    torch.bfloat16: (2, 0x7F80),
    torch.float8_e5m2: (1, 0x7C),
    torch.float8_e4m3fn: (1, 0x7E),
    torch.complex128: (8, 0x7FF0_0000_0000_0000),
    torch.complex64: (4, 0x7F80_0000),
    torch.complex32: (2, 0x7C00),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_READER = _C.ContentReader(
    {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "strided": torch.strided,
        "forms": _FORMS,
    }
)


def content_sums(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bytearray:
    """Returns 8 bytes a tensor: the same for equal contents under one name on any rank, whatever
    their layout and device; zeros for one that has no digest. Waits for devices.

    Raises:
        StagingError: a current stream is capturing a graph, or the driver failed.
    """
    sums, others = _READER.digests(list(names), list(tensors), device_memory.is_host)
    made = bytearray(sums)
    for places, samples in _samples(tensors, others):
        own = [names[at] for at in places]
        sums, _ = _READER.digests(own, samples, device_memory.is_host, are_samples=True)
        for number, at in enumerate(places):
            made[at * 8 : at * 8 + 8] = sums[number * 8 : number * 8 + 8]
    return made


def _samples(
    tensors: Sequence[torch.Tensor], places: Sequence[int]
) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Yields places of tensors, and what is looked at of these, on the host and in one dimension.

    `_BATCH` of one device and dtype come by one copy.
    """
    plain = [at for at in places if _has_memory(tensors[at])]
    if not plain:
        return
    # Raises where a graph is captured.
    device_memory.source_events({device_memory.ordinal_of(tensors[at]) for at in plain})
    index_of = lru_cache(maxsize=64)(_index_of)  # of one call: it has memory of the device
    for _, each in itertools.groupby(plain, lambda at: (tensors[at].device, tensors[at].dtype)):
        batch: list[int] = []
        parts: list[torch.Tensor] = []
        for at in each:
            batch.append(at)
            parts.append(_sample_of(tensors[at], index_of))
            if len(parts) == _BATCH:
                yield batch, _on_host(parts)
                batch, parts = [], []
        if batch:
            yield batch, _on_host(parts)


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) not in PLAIN_CLASSES or not has_strides(tensor) or tensor.is_meta:
        return False
    try:
        check_storage(tensor, "")
    except UnsupportedError:  # the save says so, with its name
        return False
    return tensor.numel() == 0 or tensor.data_ptr() != 0  # torch.func's look plain


def _sample_of(tensor: torch.Tensor, index_of: Callable[..., Any]) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    part_bytes, _ = _FORMS.get(tensor.dtype, (tensor.element_size(), 0))
    bits = tensor.view(_INTEGERS[part_bytes])  # indexing knows all of these
    index = index_of(bits.nbytes, part_bytes, bits.device)
    part = bits.reshape(-1) if index is None else torch.take(bits, index)
    return part.view(tensor.dtype)


def _index_of(nbytes: int, part_bytes: int, device: torch.device) -> torch.Tensor | None:
    """Returns the numbers of the elements that are looked at, in C order; None: all."""
    begins = _C.sample_begins(nbytes)
    if begins is None:
        return None
    each = torch.arange(_C.SAMPLE_BYTES // part_bytes)
    return (torch.tensor(begins)[:, None] // part_bytes + each).reshape(-1).to(device)


def _on_host(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns samples of one device and dtype on the host."""
    if parts[0].is_cpu:
        return list(parts)
    joined = torch.cat([part.view(torch.uint8) for part in parts]).cpu()
    each = torch.split(joined, [part.nbytes for part in parts])
    return [one.clone().view(parts[0].dtype) for one in each]  # from an address that suits
