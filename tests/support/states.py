"""States to save and load, and the one comparison that counts: bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

DTYPES = sorted(
    (
        dtype
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        if not str(dtype).startswith(("torch.q", "torch.bits", "torch.int1", "torch.uint1"))
        and not any(
            str(dtype) == f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)
        )
        and str(dtype) not in ("torch.float4_e2m1fn_x2", "torch.complex32", "torch.bcomplex32")
    ),
    key=str,
)


def random_bytes(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Returns a tensor of random bits (NaNs included), bool as 0 and 1."""
    numel = 1
    for size in shape:
        numel *= size
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def mixed_state(seed: int = 0) -> dict[str, Any]:
    """Returns a nested state with tensors of many shapes and layouts and Python values."""
    g = torch.Generator().manual_seed(seed)
    return {
        "weights": {f"layer{i}": torch.randn(64 + i, 33, generator=g) for i in range(5)},
        "large": torch.randn(300_001, generator=g),
        "bf16": torch.randn(512, 300, generator=g).bfloat16(),
        "transposed": torch.randn(200, 500, generator=g).t(),
        "channels_last": torch.randn(2, 3, 16, 16, generator=g).to(
            memory_format=torch.channels_last
        ),
        "strided": torch.randn(400, 402, generator=g)[::2, 1::3],
        "expanded": torch.randn(1, 7, generator=g).expand(50_000, 7),
        "view": torch.randn(1000, generator=g)[100:200],
        "scalar": torch.tensor(3.25 + seed),
        "one": torch.randn(1, generator=g),
        "empty": torch.zeros(0, 3),
        "bool": torch.rand(77, generator=g) > 0.5,
        "optimizer": {"state": [{"step": 3 + seed, "betas": (0.9, 0.95), "name": "adamw"}]},
        "text": "déjà vu",
        "none": None,
        "numbers": [1, 2.5, True],
    }


def blank_like(state: Any) -> Any:
    """Returns the same structure to load into: zeroed tensors, None for values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, Mapping):
        return {key: blank_like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank_like(value) for value in state]
    return None


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements' bytes in C order. A copy: length-1 dimensions may have any stride."""
    compact = tensor.detach().clone(memory_format=torch.contiguous_format)
    return compact.reshape(-1).view(torch.uint8)


def assert_same(expected: Any, found: Any, where: str = "") -> None:
    """Asserts equal structure, types and values; tensors by shape, dtype and bytes."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert expected.shape == found.shape, where
        assert expected.dtype == found.dtype, where
        assert torch.equal(raw(expected), raw(found)), where
    elif isinstance(expected, Mapping):
        assert list(expected) == list(found), where
        for key in expected:
            assert_same(expected[key], found[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(expected) is type(found), where
        assert len(expected) == len(found), where
        for i, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert_same(a, b, f"{where}.{i}")
    else:
        assert type(expected) is type(found), where
        assert expected == found, where
