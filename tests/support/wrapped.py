"""Models with submodules that are called as wrappers' are, and the wrappers themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.nn.parallel import DistributedDataParallel as Ddp


class Tree(nn.Module):
    """A module of these children and parameters."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def _linear() -> nn.Linear:
    return nn.Linear(2, 2)


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norms": lambda: Tree(a=_linear(), norms=nn.ModuleList([Tree(module=nn.BatchNorm1d(2))])),
    "both": lambda: Tree(a=_linear(), module=Tree(a=_linear())),
    "parameters": lambda: Tree(weight=_parameter(), module=Tree(weight=_parameter())),
    "deep": lambda: Tree(a=_linear(), module=Tree(a=_linear(), module=Tree(a=_linear()))),
    "only": lambda: Tree(module=_linear()),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(_linear()),
    "compiled's word": lambda: Tree(a=_linear(), _orig_mod=Tree(a=_linear())),
    "words in words": lambda: Tree(my_orig_mod=_linear(), submodule=_linear()),
}


def _fsdp1(*, use_orig_params: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        cpu = torch.device("cpu")
        wrapped = Fsdp(model, device_id=cpu, use_orig_params=use_orig_params)
        Fsdp.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT)
        return wrapped

    return wrap


def _checkpointed(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_children()):
        setattr(model, name, checkpoint_wrapper(child))
    return model


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(_checkpointed(model))
    return model


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model, backend="eager")
    return wrapped  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "none": lambda model: model,
    "DDP": Ddp,
    "compile": compiled,
    "DDP(compile)": lambda model: Ddp(compiled(model)),
    "compile(DDP)": lambda model: compiled(Ddp(model)),
    "DataParallel": nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
    "compile(checkpoint)": lambda model: compiled(checkpoint_wrapper(model)),
    "FSDP1": _fsdp1(use_orig_params=True),
    "FSDP1, flat": _fsdp1(use_orig_params=False),
    "compile(FSDP1)": lambda model: compiled(_fsdp1(use_orig_params=True)(model)),
    "FSDP2 of checkpoints": _sharded,
}
SAVED = ("none", "DDP", "compile", "DDP(compile)", "compile(DDP)")  # names of each form


def filled(model: nn.Module, seed: int) -> nn.Module:
    """Fills all of a model with values of which no two are equal."""
    values = iter(range(seed, 1 << 20))
    for tensor in model.state_dict().values():
        own = [next(values) for _ in range(tensor.numel())]
        tensor.copy_(torch.tensor(own).to(tensor.dtype).reshape(tensor.shape))
    return model


def held(model: nn.Module) -> Sequence[torch.Tensor]:
    """Returns the values of a model, in the order of its parameters and buffers."""
    inner = model if isinstance(model, Fsdp) else getattr(model, "_orig_mod", model)
    is_flat = isinstance(inner, Fsdp)
    with Fsdp.summon_full_params(inner) if is_flat else contextlib.nullcontext():
        tensors: list[Any] = [*model.parameters(), *model.buffers()]
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in tensors]
        return [one.detach().clone() for one in whole]


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Makes a process group of this process alone, which wrappers need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
