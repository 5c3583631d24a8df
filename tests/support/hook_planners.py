"""Planners that override hooks, and write down what they were asked, in which order."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from support.zip_samples import saved
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    ReadItem,
    SavePlanner,
    WriteItem,
    WriteItemType,
)


def described(value: Any) -> Any:
    """Returns what two runs must have in common of an argument: values and kinds, not identity."""
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad
        return kind, value.detach().clone(memory_format=torch.contiguous_format).flatten().tolist()
    if isinstance(value, io.BytesIO):
        return type(value).__name__, value.tell(), torch.load(value, weights_only=False)
    return value


class Recorded:
    """Mixin: every call of a hook goes to `calls` with its arguments, as they were then."""

    hooks: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[Any, ...]] = []
        for name in self.hooks:
            setattr(self, name, self._recording(name, getattr(self, name)))

    def _recording(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append((name, *map(described, args)))
            for arg in args:
                if isinstance(arg, io.BytesIO):
                    arg.seek(0)  # `described` read it
            return hook(*args)

        return call


# ---- Saves --------------------------------------------------------------------------------------


class Looks(DefaultSavePlanner):
    """Hands out another object than the state's."""

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return found + 1 if isinstance(found, torch.Tensor) else f"{found}, looked up"


class Halves(DefaultSavePlanner):
    """Another dtype than planned, made for the save."""

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.bfloat16()
        return super().transform_object(write_item, value)


class Strides(DefaultSavePlanner):
    """Strided tensors, which are not contiguous."""

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            return torch.stack([value, value], -1)[..., 1]
        return super().transform_object(write_item, value)


class Resolves(DefaultSavePlanner):
    """Makes bytes its own way, and Parameters that need a gradient."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(saved({"wrapped": self.lookup_object(write_item.index)}))
        found = super().resolve_data(write_item)
        assert isinstance(found, torch.Tensor)
        return torch.nn.Parameter(found.clone(), found.is_floating_point())


class OneBuffer(DefaultSavePlanner):
    """The planner's contract says that data may be asked for again: a buffer each, all kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def transform_object(self, write_item: WriteItem, value: Any) -> Any:
        made = super().transform_object(write_item, value)
        if isinstance(made, torch.Tensor):
            made = made * 2
        return self.kept.setdefault(write_item.index.fqn, made)


class ForeignSave(SavePlanner):
    """No subclass of the default planner."""

    def __init__(self) -> None:
        self.inner = Halves()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:  # fmt: skip  # noqa: E501
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.inner.resolve_data(write_item)


# ---- Loads --------------------------------------------------------------------------------------


class Commits(DefaultLoadPlanner):
    """Changes what was read where it lies."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            tensor.mul_(2)


class Copies(DefaultLoadPlanner):
    """Targets of its own, of another dtype; `commit_tensor` copies them."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item), dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


class Scratch(DefaultLoadPlanner):
    """One buffer for every item: what it holds is lost with the next."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        target = super().transform_tensor(read_item, tensor)
        nbytes = target.numel() * target.element_size()
        return self.buffer[:nbytes].view(target.dtype).view(target.shape)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().transform_tensor(read_item, self.lookup_tensor(read_item.dest_index)).copy_(tensor)


class Expects(DefaultLoadPlanner):
    """Remembers the item whose commit must come next, as Megatron's planner for fp8 does."""

    expected: ReadItem | None = None

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self.expected is None, "resolve_tensor before the commit of the last item"
        self.expected = read_item
        self.target = super().resolve_tensor(read_item)
        return torch.empty_like(self.target)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert read_item is self.expected, "commit_tensor of another item"
        self.target.copy_(tensor)
        self.expected = None


class LooksElsewhere(DefaultLoadPlanner):
    """Loads into tensors that are not in the state, as torch's planner of sharded optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: dict[str, torch.Tensor] = {}

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return self.elsewhere.setdefault(index.fqn, torch.zeros_like(super().lookup_tensor(index)))


class Transforms(DefaultLoadPlanner):
    """Targets with the last dimension reversed in the order of memory."""

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        target = super().transform_tensor(read_item, tensor)
        return target.t() if target.dim() == 2 and target.shape[0] == target.shape[1] else target


class LoadsBytes(DefaultLoadPlanner):
    """Takes byte items its own way; a tensor's target depends on one that was loaded before."""

    scale = 0

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.scale += 1
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item).fill_(self.scale)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise AssertionError("stock's reader never asks")


class ForeignLoad(LoadPlanner):
    """No subclass of the default planner."""

    def __init__(self) -> None:
        self.inner = Copies()

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:  # fmt: skip  # noqa: E501
        self.inner.set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> Any:
        return self.inner.create_local_plan()

    def create_global_plan(self, global_plan: Any) -> Any:
        return self.inner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: Any) -> Any:
        return self.inner.finish_plan(central_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.inner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.inner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.inner.commit_tensor(read_item, tensor)
