"""Modules whose `state_dict()` gives no memory of their own: copies, casts, other names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def plain(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def cloning(module: nn.Sequential) -> nn.Module:
    """Clones all, as FSDP's full state does."""

    def hook(_: Any, state: dict[str, Any], *__: Any) -> None:
        for name in state:
            state[name] = cloned(state[name])

    module.register_state_dict_post_hook(hook)
    return module


def cloning_one(module: nn.Sequential) -> nn.Module:
    """Clones one tensor of a submodule, by the older kind of hook."""

    def hook(_: Any, state: dict[str, Any], prefix: str, __: Any) -> dict[str, Any]:
        state[f"{prefix}bias"] = cloned(state[f"{prefix}bias"])
        return state

    module[2]._register_state_dict_hook(hook)
    return module


class Overridden(nn.Sequential):
    """Overrides `state_dict` itself."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: cloned(value) for name, value in super().state_dict(*args, **kwargs).items()}


def overridden(module: nn.Sequential) -> nn.Module:
    return Overridden(*module)


def cast(module: nn.Sequential) -> nn.Module:
    """Keeps float64, and gives float32."""

    def hook(_: Any, state: dict[str, Any], *__: Any) -> None:
        for name, value in state.items():
            state[name] = value.float() if value.dtype == torch.float64 else value

    module.double().register_state_dict_post_hook(hook)
    return module


class Wrapped(nn.Module):
    """Has the names that `torch.compile` gives, whose import takes seconds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def wrapped(module: nn.Sequential) -> nn.Module:
    return Wrapped(cloning(module))


COPYING: list[Callable[[nn.Sequential], nn.Module]] = [
    cloning, cloning_one, overridden, cast, wrapped,
]  # fmt: skip


def assert_holds(module: nn.Module, source: nn.Module) -> None:
    """Fails unless the parameters and buffers themselves have the source's values."""
    mine = [*module.parameters(), *module.buffers()]
    wanted = [*source.parameters(), *source.buffers()]
    for own, value in zip(mine, wanted, strict=True):
        assert torch.equal(own, value.to(own.dtype))
