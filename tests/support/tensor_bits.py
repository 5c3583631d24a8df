"""Values as comparable things: type, shape, dtype, and every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from support.odd_tensors import Wrapper
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _strided(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.resolve_conj().resolve_neg()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    elements = plain.view(SAME_SIZE[plain.element_size()]).contiguous()
    digest = hashlib.sha256(elements.numpy().tobytes()).hexdigest()
    return "tensor", tuple(tensor.shape), str(tensor.dtype), digest


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the strided tensors that a sparse one is made of."""
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _quantized(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.qscheme() == torch.per_tensor_affine:
        scale: Any = (tensor.q_scale(), tensor.q_zero_point())
    else:
        scale = (bits(tensor.q_per_channel_scales()), bits(tensor.q_per_channel_zero_points()))
    return "quantized", str(tensor.dtype), str(tensor.qscheme()), scale, bits(tensor.int_repr())


def bits(value: Any) -> Any:
    """Returns what two values share exactly when they are the same, bit for bit."""
    if isinstance(value, ShardedTensor):
        return [
            (shard.metadata.shard_offsets, bits(shard.tensor)) for shard in value.local_shards()
        ]
    if hasattr(value, "chunk_rows"):  # placements.Hooked
        return [bits(rows) for rows in value.chunk_rows]
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return _tensor_bits(value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: bits(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(bits(entry) for entry in value)
    return type(value).__name__, repr(value)


def _tensor_bits(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DTensor):
        return bits(tensor.to_local())
    if isinstance(tensor, AsyncCollectiveTensor):
        return bits(tensor.trigger_wait())
    if isinstance(tensor, Wrapper):
        return "wrapper", bits(tensor.inner)
    if tensor.is_quantized:
        return _quantized(tensor)
    if tensor.is_nested:
        return "nested", [bits(part) for part in tensor.unbind()]
    if tensor.layout != torch.strided:
        return str(tensor.layout), tuple(tensor.shape), [bits(part) for part in _parts(tensor)]
    kind = () if type(tensor) in (torch.Tensor, torch.nn.Parameter) else (type(tensor).__name__,)
    return (*kind, *_strided(tensor.detach().as_subclass(torch.Tensor)))
