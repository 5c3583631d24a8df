"""Tensors that are more, or less, than an address and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.chunked import Box, Chunked
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map_only


class Tagged(torch.Tensor):
    """A subclass without anything of its own."""


class TaggedParameter(torch.nn.Parameter):
    """A subclass of Parameter."""


class Wrapper(torch.Tensor):
    """A wrapper subclass: no memory of its own, every operation goes to the tensor inside."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, _meta: Any, _size: Any, _stride: Any) -> Wrapper:
        return Wrapper(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner_args, inner_kwargs = tree_map_only(Wrapper, lambda x: x.inner, (args, kwargs or {}))
        found = func(*inner_args, **inner_kwargs)
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, Wrapper, found)


class Opaque(Wrapper):
    """A wrapper subclass that does not say what is inside it, as code before 2.1 is written."""

    __tensor_flatten__ = None  # type: ignore[assignment]


class Folded(Chunked):
    """A matrix that DCP's hooks describe as a vector: its chunk has other dimensions than it."""

    @property
    def boxes(self) -> list[Box]:  # type: ignore[override]
        return [Box((0,), (self.numel(),))]

    @property
    def parts(self) -> list[torch.Tensor]:  # type: ignore[override]
        return [self.as_subclass(torch.Tensor)]

    @property
    def whole_size(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([self.numel()])


def low_bits(dtype: torch.dtype) -> Callable[[torch.Generator], torch.Tensor]:
    """Returns a maker of tensors of a dtype that `view` does not know."""

    def make(g: torch.Generator) -> torch.Tensor:
        raw = torch.randint(0, 256, (12,), dtype=torch.uint8, generator=g)
        return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (3, 4), (4, 1))

    return make


def async_tensor(g: torch.Generator) -> torch.Tensor:
    """What a functional collective returns while it is under way."""
    made: torch.Tensor = AsyncCollectiveTensor(torch.randn(4, 5, generator=g))
    return made


def fake_tensor(_: torch.Generator) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 5)


def functional_tensor(g: torch.Generator) -> torch.Tensor:
    """What torch.func.functionalize makes: looks plain, has no memory."""
    made: torch.Tensor = torch._to_functional_tensor(torch.randn(4, 5, generator=g))
    return made


def zero_tensor(_: torch.Generator) -> torch.Tensor:
    """What autograd makes for tangents that are zero: looks plain, has no memory."""
    made: torch.Tensor = torch._efficientzerotensor((4, 5))
    return made


def freed_tensor(g: torch.Generator) -> torch.Tensor:
    """What FSDP leaves of a parameter that is not gathered."""
    tensor = torch.randn(4, 5, generator=g)
    tensor.untyped_storage().resize_(0)
    return tensor
