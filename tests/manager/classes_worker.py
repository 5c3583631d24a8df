"""States of every class on ranks with DDP and FSDP2: `test_state_classes.py` starts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from classes import EveryClass, described, whole
from support.worker import rank_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from trainings import manager_of


class Zero1(torch.optim.Optimizer):
    """Plain parameters, whose moments are sharded over all ranks."""

    def __init__(self, parameters: Any, names: tuple[str, ...] | None = None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        world = (dist.get_world_size(),)
        self.mesh = init_device_mesh("cpu", world, mesh_dim_names=names)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mine = distribute_tensor(parameter.grad, self.mesh, [Shard(0)])
                if not state:
                    state["moment"] = torch.zeros_like(mine)
                state["moment"].mul_(0.9).add_(mine)
                parameter.sub_(state["moment"].full_tensor(), alpha=group["lr"])


def sharded(model: torch.nn.Module) -> Any:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


WRAPS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "every": EveryClass,
    "zero1": Zero1,
    "zero1-named": lambda parameters: Zero1(parameters, ("shards",)),
}


def made(wrap: str, kind: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = WRAPS[wrap](torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)))
    return model, OPTIMIZERS[kind](model.parameters())


def train(model: Any, optimizer: Any, *steps: int) -> list[Any]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.rand(3, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(one).detach().tolist() for one in model.parameters()]


KINDS = [("ddp", "every"), ("fsdp2", "every"), ("ddp", "zero1"), ("ddp", "zero1-named")]


@rank_case()
def main(root: Path, phase: str) -> None:
    """Saves on two ranks, or resumes on any number; the saving ranks write what they trained."""
    for wrap, kind in KINDS:
        case(root / f"{wrap}-{kind}", phase, wrap, kind)


def case(at: Path, phase: str, wrap: str, kind: str) -> None:
    manager = manager_of(at / "root")
    if phase == "save":
        model, optimizer = made(wrap, kind, 0)
        train(model, optimizer, 0, 1)
        manager.save(1, model=model, optimizer=optimizer)
        states = [described(own) for own in optimizer.state.values()]
        end = train(model, optimizer, 2, 3)
        for has_state in (False, True):
            other, resumed = made(wrap, kind, 1)
            if has_state:  # which is filled in place
                train(other, resumed, 5)
            manager.resume(model=other, optimizer=resumed)
            assert [described(own) for own in resumed.state.values()] == states, has_state
            assert train(other, resumed, 2, 3) == end
        if dist.get_rank() == 0:
            torch.save(end, at / "end.pt")
        return
    model, optimizer = made(wrap, kind, 1)
    manager.resume(model=model, optimizer=optimizer)
    expected = torch.load(at / "end.pt", weights_only=True)
    for mine, theirs in zip(train(model, optimizer, 2, 3), expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))  # sums in other orders
