"""What addresses and strides say of a tensor's memory, and when they do not say it all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_dcpx.errors import UnsupportedError

PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)  # exact types; others may keep more than values


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the elements fill one run of memory, in any order, without overlap."""
    if tensor.is_contiguous():
        return True
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_disjoint(tensor: torch.Tensor) -> bool:
    """Returns whether strides show at once that no two elements share memory."""
    if tensor.is_contiguous():
        return True
    span = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in dims if size != 1):
        if stride < span:
            return False
        span += (size - 1) * stride
    return True


def has_strides(tensor: torch.Tensor) -> bool:
    """Returns whether the elements lie in a storage as strides say, in one way or another."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether addresses and strides say all about the tensor's values."""
    return has_strides(tensor) and not tensor.is_conj() and not tensor.is_neg()


def byte_strides(
    lengths: Sequence[int], strides: Sequence[int], elem_bytes: int
) -> tuple[int, ...]:
    """Returns strides in bytes; 0 where one element has none, whatever torch keeps there."""
    return tuple(
        stride * elem_bytes if length > 1 else 0
        for length, stride in zip(lengths, strides, strict=True)
    )


def check_storage(tensor: torch.Tensor, fqn: str) -> None:
    """Raises UnsupportedError when a tensor's view reaches behind its storage.

    FSDP and others free a parameter's memory by resizing its storage under it.
    """
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in dims)
    needed = (tensor.storage_offset() + reach) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if needed > held:
        raise UnsupportedError(
            f"'{fqn}' needs {needed} B of a storage that holds {held} B: its memory was freed or "
            "resized"
        )
