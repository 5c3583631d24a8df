"""FSDP2 with several optimizers, stages of a pipeline, FSDP1, several saves in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
import torch.distributed as dist
from classes import EveryClass, described
from classes import whole as full
from support.rank_fixture import StartRanks
from support.states import assert_same
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from trainings import FAST, fully_sharded, manager_of

from torch_dcpx import KeyMap, MismatchError, PlanError


class Net(torch.nn.Module):
    """Two layers, under names of the caller's."""

    def __init__(self, seed: int, names: tuple[str, str] = ("a", "b")) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.order = names
        for name, sizes in zip(names, ((8, 13), (13, 4)), strict=True):
            setattr(self, name, torch.nn.Linear(*sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def sharded(seed: int, names: tuple[str, str] = ("a", "b")) -> tuple[Any, dict[str, Any]]:
    """An FSDP2 model with a frozen group, and two optimizers."""
    model: Any = Net(seed, names)
    first, second = (getattr(model, name) for name in names)
    second.bias.requires_grad_(False)
    fully_sharded(model)
    groups = [{"params": [second.weight]}, {"params": [second.bias], "lr": 7.0}]
    optimizers = {
        "one": torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9),
        "two": torch.optim.AdamW(groups, lr=0.5),
    }
    return model, optimizers


def train(model: Any, optimizers: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)  # the same batch on every rank
    model(torch.rand(6, 8, generator=generator)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    """Returns a state with whole tensors in place of shards."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def states_of(model: Any, optimizers: dict[str, Any]) -> dict[str, Any]:
    states = {n: get_optimizer_state_dict(model, one) for n, one in optimizers.items()}
    for one in states.values():  # in an order of their own: a fresh optimizer takes the stored one
        one["state"] = {name: dict(sorted(own.items())) for name, own in one["state"].items()}
    return {"model": whole(get_model_state_dict(model)), "optimizers": whole(states)}


def sharded_training_with_several_optimizers(root: Path) -> None:
    model, optimizers = sharded(0)
    train(model, optimizers.values(), 1)
    with manager_of(root / "fsdp2") as manager:
        manager.save(1, model=model, optimizer=optimizers)
        report = manager.export(1, root / "stored")
        assert report.tensors == 4
        manager.export(model, root / "live")
        with pytest.raises(PlanError, match="rank 1: path="):
            manager.export(1, root / f"rank{dist.get_rank()}")
        rules = [(r"^a\.", "x.")] * dist.get_rank()
        with pytest.raises(PlanError, match=r"rank 1: translate='1 rules.*rank 0 has '0 rules"):
            manager.resume(model=model, translate=KeyMap(*rules))
    expected = states_of(model, optimizers)
    if dist.get_rank() == 0:
        torch.save(expected, root / "fsdp2.pt")


def stages_of_a_pipeline(root: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = stage(rank)
    stage_step(model, optimizer, rank)
    with manager_of(root / "stages") as manager:
        manager.save(1, model=model, optimizer=optimizer)
        other, others = stage(rank, lr=7.0)
        info = manager.resume(model=other, optimizer=others)
    assert info.report is not None and info.report.unexpected == ()
    assert_same(states_of(model, {"": optimizer}), states_of(other, {"": others}))
    assert others.param_groups[0]["lr"] == 0.1 * (rank + 1)
    stage_step(model, optimizer, rank)
    stage_step(other, others, rank)
    assert_same(model.state_dict(), other.state_dict())


def stage(*ranks: int, lr: float | None = None) -> tuple[Any, torch.optim.Optimizer]:
    """Stages of a pipeline, each with a layer of its own name and a group for it."""
    torch.manual_seed(sum(ranks) + int(lr or 0))
    model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(8, 8) for rank in ranks})
    groups = [
        {"params": list(model[f"stage{rank}"].parameters()), "lr": lr or 0.1 * (rank + 1)}
        for rank in ranks
    ]
    return model, torch.optim.AdamW(groups)


def stage_step(model: Any, optimizer: Any, *ranks: int) -> None:
    x = torch.ones(2, 8)
    for rank in ranks:
        x = model[f"stage{rank}"](x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def several_saves_in_flight(root: Path) -> None:
    several = dataclasses.replace(FAST, max_in_flight=3)
    with manager_of(root / "many", async_save=True, keep_last=2, options=several) as manager:
        tensors = torch.zeros(100_000)
        for step in range(1, 6):
            manager.save(step, state={"x": tensors})
            tensors += 1  # what was copied is what is saved
        manager.wait()
        assert manager.tags() == ["step-4", "step-5"]
        for step in (4, 5):
            state = {"x": torch.zeros(100_000)}
            assert manager.resume(tag=step, state=state).step == step
            assert state["x"].eq(step - 1).all()


def one_rank_goes_on_with_what_two_have_saved(root: Path) -> None:
    expected = torch.load(root / "fsdp2.pt", weights_only=True)
    model, optimizers = sharded(1)
    manager_of(root / "fsdp2").resume(model=model, optimizer=optimizers)
    assert_same(expected, states_of(model, optimizers))

    names = ("module", "last")  # what a wrapper would be called, and another one
    model, optimizers = sharded(2, names)
    rules = KeyMap((r"^a\.", "module."), (r"^b\.", "last."))
    manager_of(root / "fsdp2").resume(model=model, optimizer=optimizers, translate=rules)
    found = states_of(model, optimizers)
    assert_same(list(expected["model"].values()), list(found["model"].values()))
    for name in ("one", "two"):
        old, new = expected["optimizers"][name], found["optimizers"][name]
        assert_same(list(old["state"].values()), list(new["state"].values()))
        for before, after in zip(old["param_groups"], new["param_groups"], strict=True):
            assert_same({**before, "params": []}, {**after, "params": []})


def one_rank_has_all_stages(root: Path) -> None:
    model, optimizer = stage(0, 1, lr=7.0)
    manager_of(root / "stages").resume(model=model, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    for rank in (0, 1):
        own, own_optimizer = stage(rank)
        stage_step(own, own_optimizer, rank)
        assert_same(own[f"stage{rank}"].state_dict(), model[f"stage{rank}"].state_dict())
        moments = own_optimizer.state[own[f"stage{rank}"].bias]
        assert_same(moments, optimizer.state[model[f"stage{rank}"].bias])
    rules = KeyMap(lambda name: name.replace("stage1.", "last.") if name[5] == "1" else None)
    renamed = torch.nn.ModuleDict({"last": torch.nn.Linear(8, 8)})
    last = torch.optim.AdamW(renamed.parameters(), lr=7.0)
    manager_of(root / "stages").resume(model=renamed, optimizer=last, translate=rules)
    assert last.param_groups[0]["lr"] == 0.2
    assert_same(renamed["last"].state_dict(), model["stage1"].state_dict())
    together = torch.optim.AdamW(model.parameters(), lr=7.0)
    with pytest.raises(MismatchError, match=r"'stage1.*are one group of the optimizer"):
        manager_of(root / "stages").resume(model=model, optimizer=together)


@pytest.mark.slow
@pytest.mark.multirank
def test_what_two_ranks_saved_one_resumes(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2)(sharded_training_with_several_optimizers, tmp_path)
    exported = [st.load_file(tmp_path / name / "model.safetensors") for name in ("stored", "live")]
    assert_same(*exported)
    for case in (stages_of_a_pipeline, several_saves_in_flight):
        ranks(2)(case, tmp_path)
    for case in (one_rank_goes_on_with_what_two_have_saved, one_rank_has_all_stages):
        ranks(1)(case, tmp_path)


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


WRAPS: dict[str, Callable[[Any], Any]] = {"ddp": DistributedDataParallel, "fsdp2": fully_sharded}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "every": EveryClass,
    "zero1": Zero1,
    "zero1-named": lambda parameters: Zero1(parameters, ("shards",)),
}


def wrapped(wrap: str, kind: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = WRAPS[wrap](torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)))
    return model, OPTIMIZERS[kind](model.parameters())


def trained_on(model: Any, optimizer: Any, *steps: int) -> list[Any]:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(torch.rand(3, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(one).detach().tolist() for one in model.parameters()]


KINDS = [("ddp", "every"), ("fsdp2", "every"), ("ddp", "zero1"), ("ddp", "zero1-named")]


def states_of_every_class(at: Path, wrap: str, kind: str, *, saves: bool) -> None:
    manager = manager_of(at / "root")
    if saves:
        model, optimizer = wrapped(wrap, kind, 0)
        trained_on(model, optimizer, 0, 1)
        manager.save(1, model=model, optimizer=optimizer)
        states = [described(own) for own in optimizer.state.values()]
        end = trained_on(model, optimizer, 2, 3)
        for has_state in (False, True):
            other, resumed = wrapped(wrap, kind, 1)
            if has_state:  # which is filled in place
                trained_on(other, resumed, 5)
            manager.resume(model=other, optimizer=resumed)
            assert [described(own) for own in resumed.state.values()] == states, has_state
            assert trained_on(other, resumed, 2, 3) == end
        if dist.get_rank() == 0:
            torch.save(end, at / "end.pt")
        return
    model, optimizer = wrapped(wrap, kind, 1)
    manager.resume(model=model, optimizer=optimizer)
    expected = torch.load(at / "end.pt", weights_only=True)
    for mine, theirs in zip(trained_on(model, optimizer, 2, 3), expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs))  # sums in other orders


@pytest.mark.slow
@pytest.mark.multirank
def test_entries_come_back_on_the_same_and_on_fewer_ranks(
    ranks: StartRanks, tmp_path: Path
) -> None:
    for count in (2, 1):
        for wrap, kind in KINDS:
            at = tmp_path / f"{wrap}-{kind}"
            ranks(count)(states_of_every_class, at, wrap, kind, saves=count == 2)
