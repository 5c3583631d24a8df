"""`unchanged` on two ranks with FSDP2: `test_unchanged.py` starts it.

Its argument: quick, fsdp1, layouts, schedulers, or a number below 4: every fourth optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker import rank_case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from trainings import manager_of
from unchanged import LAYOUTS, Case, Training, check_unchanged, optimizers, schedulers, variants

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


def shard(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model


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
                check_unchanged(root / f"fsdp2-{case}", case, shard)
                check_unchanged(root / f"fsdp1-{case}", case, wrap)
        if layout not in ("contiguous", "offset"):
            with pytest.raises(NotImplementedError, match="non-contiguous parameters"):
                Training(case, 0, shard)


def refusal(name: str, arguments: dict[str, Any]) -> str | None:
    """Returns what torch says of a combination that it cannot step."""
    known = CANNOT.get(name, {})
    true = [key for key, value in arguments.items() if value is True]
    return next((known[key] for key in (*true, "") if key in known), None)


def check(root: Path, name: str, arguments: dict[str, Any], scheduler: str) -> None:
    case = Case(name, arguments, scheduler)
    text = refusal(name, arguments)
    if text is None:
        check_unchanged(root / str(case), case, shard)
        return
    training = Training(case, 0, shard)
    with pytest.raises((RuntimeError, NotImplementedError), match=text):
        training.train(0)
    if name == "LBFGS":
        check_unchanged(root / str(case), case._replace(is_used_only=True), shard)


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


@rank_case()
def main(root: Path, amount: str) -> None:
    if amount == "quick":
        check(root, "AdamW", {"fused": True}, "OneCycleLR")
        check(root, "SGD", {"momentum": 0.9}, "SequentialLR")
        counters_of_a_sharded_scalar_are_plain_and_its_moments_are_sharded(root)
    elif amount == "fsdp1":
        for case in (
            Case("AdamW", {"foreach": True}, "StepLR"),
            Case("SGD", {"momentum": 0.9}, "StepLR"),
        ):
            check_unchanged(root / str(case), case, wrap)
    elif amount == "layouts":
        layouts(root)
    elif amount == "schedulers":
        for scheduler in schedulers():
            check(root, "AdamW", {"foreach": True}, scheduler)
    else:
        for name in optimizers()[int(amount) :: 4]:
            for arguments in variants(name):
                check(root, name, arguments, "StepLR")
