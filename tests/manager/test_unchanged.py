"""A training is bit for bit the same, saved or not, resumed or not, with whatever torch offers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_fixture import StartRanks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from trainings import fully_sharded, manager_of
from unchanged import LAYOUTS, Case, Training, check_unchanged, optimizers, schedulers, variants

EVERY = [(name, arguments) for name in optimizers() for arguments in variants(name)]
QUICK = [
    (name, arguments)
    for number, (name, arguments) in enumerate(EVERY)
    if name != EVERY[number - 1][0] or arguments.keys() & {"fused", "momentum"}
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair(name: str, arguments: dict[str, Any], scheduler: str) -> Case:
    """These schedulers turn momentum on, and torch's fused SGD cannot step a group of which only
    some parameters have a buffer: an expert that is routed to late has none."""
    is_mixed = (name, arguments) == ("SGD", {"fused": True})
    is_mixed = is_mixed and scheduler in ("CyclicLR", "OneCycleLR")
    return Case(name, arguments, scheduler, is_used_only=is_mixed)


PAIRS = [pair(*one, scheduler) for one, scheduler in zip(QUICK, cycle(schedulers()), strict=False)]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_every_optimizer_and_scheduler_trains_as_if_alone(tmp_path: Path, case: Case) -> None:
    assert {one.scheduler for one in PAIRS} == set(schedulers())
    check_unchanged(tmp_path, case, is_whole=False)


@pytest.mark.parametrize("layout", LAYOUTS.keys() - {"contiguous"})
def test_moments_have_the_strides_that_they_had(tmp_path: Path, layout: str) -> None:
    check_unchanged(tmp_path / "adam", Case("AdamW", {"fused": True}, "StepLR", layout=layout))
    if layout == "transposed":
        case = Case("SGD", {"fused": True, "momentum": 0.9}, "StepLR", True, layout)
        check_unchanged(tmp_path / "sgd", case)


def cannot_step(case: Case) -> bool:
    """Returns whether torch itself refuses: LBFGS flattens all parameters by `view`."""
    if case.optimizer != "LBFGS" or case.layout in ("contiguous", "offset", "strided"):
        return False
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        Training(case, 0).train_to_the_end()
    return True


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("layout", LAYOUTS.keys() - {"contiguous"})
def test_every_optimizer_trains_on_with_every_layout(tmp_path: Path, layout: str) -> None:
    for name, arguments in EVERY:
        case = Case(name, arguments, "StepLR", layout=layout)
        if not cannot_step(case):
            check_unchanged(tmp_path / str(case), case)


@pytest.mark.slow  # minutes: all variants, and the pairs
@pytest.mark.parametrize("name", optimizers())
def test_every_pair_trains_as_if_nobody_had_saved_or_resumed(tmp_path: Path, name: str) -> None:
    takes_foreach = "foreach" in inspect.signature(Case(name, {}, "").kind).parameters
    for arguments in variants(name):
        is_paired = "fused" in arguments or arguments.get("foreach", not takes_foreach)
        for scheduler in schedulers() if is_paired else ["StepLR"]:
            case = pair(name, arguments, scheduler)
            check_unchanged(tmp_path / str(case), case)


# What torch cannot step with FSDP2, and what it says: checked below, for it may learn to.
CANNOT = {
    "Adafactor": {"": "in-place operations that require placement changes"},
    "Adagrad": {"fused": "_fused_adagrad_.default does not have a sharding strategy"},
    "LBFGS": {"": "got mixed torch.Tensor and DTensor"},  # with parameters without gradients
    "Rprop": {
        "": "in-place operations that require placement changes",
        "foreach": "_foreach_copy_.default does not have a sharding strategy",
    },
    "SGD": {"fused": "_fused_sgd_.default does not have a sharding strategy"},
    "SparseAdam": {"": "fsdp::chunk_cat.*SparseCPU"},
}


def wrap(model: torch.nn.Module) -> torch.nn.Module:
    """Shards by FSDP1, whose optimizers hold parts of one flat parameter."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def replicate(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def layouts(root: Path) -> None:
    """Trains with parameters of other strides, as far as torch takes them."""
    for layout in LAYOUTS:
        for name, arguments in (("AdamW", {"fused": True}), ("AdamW", {"foreach": True}),
                                ("SGD", {"momentum": 0.9, "foreach": True})):  # fmt: skip
            case = Case(name, arguments, "StepLR", layout=layout)
            check_unchanged(root / f"ddp-{case}", case, replicate)
            if layout in ("contiguous", "offset"):
                check_unchanged(root / f"fsdp2-{case}", case, fully_sharded)
                check_unchanged(root / f"fsdp1-{case}", case, wrap)
        if layout not in ("contiguous", "offset"):
            with pytest.raises(NotImplementedError, match="non-contiguous parameters"):
                Training(case, 0, fully_sharded)


def refusal(name: str, arguments: dict[str, Any]) -> str | None:
    """Returns what torch says of a combination that it cannot step."""
    known = CANNOT.get(name, {})
    true = [key for key, value in arguments.items() if value is True]
    return next((known[key] for key in (*true, "") if key in known), None)


def check(root: Path, name: str, arguments: dict[str, Any], scheduler: str) -> None:
    case = Case(name, arguments, scheduler)
    text = refusal(name, arguments)
    if text is None:
        check_unchanged(root / str(case), case, fully_sharded)
        return
    training = Training(case, 0, fully_sharded)
    with pytest.raises((RuntimeError, NotImplementedError), match=text):
        training.train(0)
    if name == "LBFGS":
        check_unchanged(root / str(case), case._replace(is_used_only=True), fully_sharded)


def counters_of_a_sharded_scalar_are_plain_and_its_moments_are_sharded(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def stepped(model: Any, optimizer: Any, times: int) -> None:
        for _ in range(times):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    def made(value: float) -> tuple[Any, Any]:
        scale = distribute_tensor(torch.tensor(value), mesh, [Replicate()])
        model = torch.nn.ParameterDict({"scale": scale})
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    (model, optimizer), (other, fresh) = made(1.0), made(2.0)
    stepped(model, optimizer, 2)
    manager = manager_of(root / "scalar")
    manager.save(2, model=model, optimizer=optimizer)
    manager.resume(model=other, optimizer=fresh)
    kinds = {key: type(value) for key, value in fresh.state[other["scale"]].items()}
    assert kinds == {key: type(value) for key, value in optimizer.state[model["scale"]].items()}
    assert (kinds["step"], kinds["exp_avg"]) == (torch.Tensor, DTensor)
    stepped(model, optimizer, 1)
    stepped(other, fresh, 1)
    assert torch.equal(model["scale"].to_local(), other["scale"].to_local())


def quick(root: Path) -> None:
    check(root, "AdamW", {"fused": True}, "OneCycleLR")
    check(root, "SGD", {"momentum": 0.9}, "SequentialLR")
    counters_of_a_sharded_scalar_are_plain_and_its_moments_are_sharded(root)


def fsdp1(root: Path) -> None:
    for name, arguments in (("AdamW", {"foreach": True}), ("SGD", {"momentum": 0.9})):
        case = Case(name, arguments, "StepLR")
        check_unchanged(root / str(case), case, wrap)


def with_every_scheduler(root: Path) -> None:
    for scheduler in schedulers():
        check(root, "AdamW", {"foreach": True}, scheduler)


def every_fourth_optimizer(root: Path, first: int) -> None:
    for name in optimizers()[first::4]:
        for arguments in variants(name):
            check(root, name, arguments, "StepLR")


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("amount", ["quick", "fsdp1", "layouts", "schedulers", *range(4)])
def test_sharded_training_is_the_same_saved_or_not_resumed_or_not(
    ranks: StartRanks, tmp_path: Path, amount: Any
) -> None:
    if isinstance(amount, int):
        ranks(2)(every_fourth_optimizer, tmp_path, amount)
        return
    cases = {"fsdp1": fsdp1, "layouts": layouts, "schedulers": with_every_scheduler}
    ranks(2)(cases.get(amount, quick), tmp_path)
