"""Other tensors on two ranks under one name: a warning, or an error; none for copies of DDP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.rank_fixture import StartRanks
from torch.nn.parallel import DistributedDataParallel
from trainings import manager_of

import torch_dcpx as dcpx

HEARD: list[str] = []
Save = Callable[[Any, Path], None]


def heard() -> list[str]:
    """Returns what the coordinator logged since the last call; all ranks get it."""
    found = [list(HEARD)]
    dist.broadcast_object_list(found, 0)
    HEARD.clear()
    return found[0]


def by_manager(model: Any, path: Path, **parts: Any) -> None:
    with manager_of(path) as manager:
        manager.save(1, model=model, **parts)


def by_save(model: Any, path: Path) -> None:
    dcpx.save({"model": model}, path)


def by_async_save(model: Any, path: Path) -> None:
    dcpx.async_save({"model": model.state_dict()}, path).result(seconds(60))


def experts(name: str) -> torch.nn.ModuleDict:
    """Each rank's own, with the same names."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(10.0 * dist.get_rank())
    return model


def each_call_says_once_what_differs(root: Path) -> None:
    calls: tuple[Save, ...] = (by_save, by_async_save, by_manager)
    for call in calls:
        name = f"of {call.__name__}"
        for number in range(3):
            call(experts(name), root / f"{name}{number}")
            said = heard()
            assert len(said) == (number == 0), said
            assert number or all(part in said[0] for part in ("2 tensors", name, "ranks 0, 1"))


def all_ranks_raise_it_as_an_error(root: Path) -> None:
    planner = dcpx.DcpxSavePlanner(on_conflict="error")
    for call in (dcpx.save, dcpx.async_save):
        with pytest.raises(dcpx.PlanError, match="2 tensors differ") as caught:
            call({"model": experts("strict")}, root / "strict", planner=planner)
        assert caught.value.fqn == "model.strict.weight"
    dist.barrier()
    assert not any((root / "strict").glob("*.distcp"))
    assert not heard()


def values_where_other_ranks_hold_names_are_said(root: Path) -> None:
    rank = dist.get_rank()
    states = {
        "history": [[{"loss": 1.0}], []],
        "best": [None, {"step": 3, "model": torch.ones(2)}],
        "seen": [torch.ones(2), {"a": {"b": torch.ones(2)}}],
    }
    for name, own in states.items():
        for number in range(2):
            with manager_of(root / f"{name}{number}") as manager:
                manager.save(1, state={name: own[rank], "step": 1})
            said = heard()
            assert len(said) == (number == 0), said
            value = 1 if name == "history" else 0
            assert number or f"'state.{name}' is a value on rank {value} of the group" in said[0]
            assert number or (f"'state.{name}." in said[0] and f"on rank {1 - value};" in said[0])
        planner = dcpx.DcpxSavePlanner(on_conflict="error")
        with pytest.raises(dcpx.PlanError, match=f"'nested.{name}' is a value") as caught:
            dcpx.save({"nested": {name: own[rank]}}, root / f"{name}-strict", planner=planner)
        assert caught.value.fqn == f"nested.{name}"
    # Other lengths are other names, and a value beside a container is one.
    other = {"lengths": [{"a": 1}] * (rank + 1), "own": {f"{rank}": 1}, "x": []}
    dcpx.save(other, root / "lengths")
    assert not heard()


def states_of_optimizers(root: Path) -> None:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    dcpx.save({"optim": optimizer.state_dict()}, root / "numbered")
    (said,) = heard()
    assert "'optim.state.0.exp_avg'" in said and "step" not in said


def trained(model: Any, batches: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(batches):
        torch.manual_seed(10 * number + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    return optimizer


def normed() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))


def data_parallel_trainings_say_nothing(root: Path) -> None:
    model = DistributedDataParallel(normed())
    for number in range(3):
        optimizer = trained(model)
        by_manager(model, root / f"ddp{number}", optimizer=optimizer)
        by_save(model, root / f"ddp-saved{number}")
    assert not heard()
    # Of buffers DDP takes rank 0's: so does the checkpoint, and no mix.
    mine = {name: value.clone() for name, value in model.module.named_buffers()}
    back = normed()
    with manager_of(root / "ddp2") as manager:
        manager.resume(model=back)
    for name, value in back.named_buffers():
        wanted = mine[name].clone()
        dist.broadcast(wanted, 0)
        assert torch.equal(value, wanted), name
    plain = DistributedDataParallel(torch.nn.Linear(4, 4))
    for number in range(3):
        optimizer = trained(plain)
        state = {"m": plain.state_dict(), "o": optimizer.state_dict()}
        dcpx.save(state, root / f"plain{number}")
    assert not heard()


def done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def what_ddp_does_not_keep_equal_is_said(root: Path) -> None:
    own = DistributedDataParallel(normed(), broadcast_buffers=False)
    by_manager(own, root / "buffers", optimizer=trained(own))
    (said,) = heard()
    assert "'model.1.running_mean'" in said and "weight" not in said
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), experts("ignored")["ignored"])
    names = ["1.weight", "1.bias"]
    ignoring: Any = DistributedDataParallel
    ignoring._set_params_and_buffers_to_ignore_for_model(module, names)
    by_manager(DistributedDataParallel(module), root / "ignored")
    (said,) = heard()
    assert "2 tensors" in said and "'model.1.weight'" in said
    layers = torch.nn.ModuleDict({"trained": normed(), "frozen": torch.nn.Linear(4, 4)})
    frozen = DistributedDataParallel(layers)
    layers["frozen"].get_parameter("weight").requires_grad_(False).fill_(10.0 * dist.get_rank())
    by_manager(frozen, root / "frozen")
    (said,) = heard()
    assert "1 tensors" in said and "'model.frozen.weight'" in said
    local = DistributedDataParallel(torch.nn.Linear(4, 4))
    # Its gradients stay its own, as with local SGD.
    local.register_comm_hook(None, lambda _, bucket: done(bucket.buffer()))
    trained(local)
    by_manager(torch.nn.ModuleDict({"local": local}), root / "local")
    (said,) = heard()
    assert "local" in said and "weight" in said
    groups = [dist.new_group([rank]) for rank in range(2)]
    stage = DistributedDataParallel(experts("stage"), process_group=groups[dist.get_rank()])
    by_manager(stage, root / "stages")
    (said,) = heard()
    assert "'model.stage.weight'" in said


def two_groups_of_ddp_are_said_to_differ(root: Path) -> None:
    half = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(half)  # so equal within a group
    stage = torch.nn.ModuleDict({"stage": torch.nn.Linear(4, 4)})
    by_manager(DistributedDataParallel(stage, process_group=groups[half]), root)
    (said,) = heard()
    assert "'model.stage.weight'" in said and "ranks 0, 2" in said


def ways_out_say_nothing(root: Path) -> None:
    rank = dist.get_rank()
    with manager_of(root / "ways") as manager:
        manager.save(1, state={"x": dcpx.PerRank(torch.full((3,), rank)), f"of {rank}": 1})
    dcpx.save({f"x{rank}": torch.full((3,), rank)}, root / "names")
    dcpx.save({"alone": torch.full((3,), rank)}, root / f"alone{rank}", no_dist=True)
    assert not heard()


class Heard(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        HEARD.append(record.getMessage())


def begin_to_hear() -> None:
    logging.getLogger("torch_dcpx").addHandler(Heard(logging.WARNING))


CASES = (
    each_call_says_once_what_differs,
    all_ranks_raise_it_as_an_error,
    values_where_other_ranks_hold_names_are_said,
    states_of_optimizers,
    data_parallel_trainings_say_nothing,
    what_ddp_does_not_keep_equal_is_said,
    ways_out_say_nothing,
)


def test_two_ranks_hear_of_tensors_that_differ(ranks: StartRanks, tmp_path: Path) -> None:
    two = ranks(2, anew=True)
    two(begin_to_hear)
    for case in CASES:
        two(case, tmp_path)


def test_four_ranks_hear_of_two_groups_that_differ(ranks: StartRanks, tmp_path: Path) -> None:
    four = ranks(4, anew=True)
    four(begin_to_hear)
    four(two_groups_of_ddp_are_said_to_differ, tmp_path / "root")
