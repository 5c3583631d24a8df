"""A training is bit for bit the same, saved or not, resumed or not, with whatever torch offers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_cases
from torch.optim import lr_scheduler
from unchanged import LAYOUTS, Case, Training, check_unchanged, optimizers, schedulers, variants

WORKER = Path(__file__).with_name("unchanged_worker.py")
EVERY = [(name, arguments) for name in optimizers() for arguments in variants(name)]
QUICK = [
    (name, arguments)
    for number, (name, arguments) in enumerate(EVERY)
    if name != EVERY[number - 1][0] or arguments.keys() & {"fused", "momentum"}
]


# They turn momentum on, and torch's fused SGD cannot step a group of which only some parameters
# have a buffer: an expert that is routed to late has none.
MIXED = [Case("SGD", {"fused": True}, name) for name in ("CyclicLR", "OneCycleLR")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", [Case(*one, "StepLR") for one in QUICK], ids=str)
def test_every_optimizer_trains_as_if_nobody_had_saved_or_resumed(
    tmp_path: Path, case: Case
) -> None:
    check_unchanged(tmp_path, case)


@pytest.mark.parametrize("name", schedulers())
def test_every_scheduler_goes_on_as_if_nobody_had_saved_or_resumed(
    tmp_path: Path, name: str
) -> None:
    check_unchanged(tmp_path, Case("AdamW", {}, name))


@pytest.mark.parametrize("layout", LAYOUTS.keys() - {"contiguous"})
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_moments_have_the_strides_that_they_had(tmp_path: Path, name: str, layout: str) -> None:
    arguments = {"fused": True} if name == "AdamW" else {"fused": True, "momentum": 0.9}
    check_unchanged(tmp_path, Case(name, arguments, "StepLR", name == "SGD", layout))


def cannot_step(case: Case) -> bool:
    """Returns whether torch itself refuses: LBFGS flattens all parameters by `view`."""
    if case.optimizer != "LBFGS" or case.layout in ("contiguous", "offset", "strided"):
        return False
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        Training(case, 0).train_to_the_end()
    return True


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("layout", LAYOUTS.keys() - {"contiguous"})
def test_every_optimizer_trains_on_with_every_layout_of_parameters(
    tmp_path: Path, layout: str
) -> None:
    for name, arguments in EVERY:
        case = Case(name, arguments, "StepLR", layout=layout)
        if not cannot_step(case):
            check_unchanged(tmp_path / str(case), case)


@pytest.mark.slow  # minutes: all variants, and the pairs
@pytest.mark.parametrize("optimizer", EVERY, ids=lambda one: str(Case(*one, "")))
def test_every_pair_trains_as_if_nobody_had_saved_or_resumed(
    tmp_path: Path, optimizer: tuple[str, dict[str, Any]]
) -> None:
    takes_foreach = "foreach" in inspect.signature(Case(*optimizer, "").kind).parameters
    is_paired = "fused" in optimizer[1] or optimizer[1].get("foreach", not takes_foreach)
    for name in schedulers() if is_paired else ["StepLR"]:
        case = Case(*optimizer, name)
        if case in MIXED:
            with pytest.raises(TypeError, match="expected Tensor as element"):
                Training(case, 0).train_to_the_end()
            case = case._replace(is_used_only=True)
        check_unchanged(tmp_path / name, case)


def _sparse_step_of_dense_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.sum().backward()
    torch.optim.SparseAdam([parameter]).step()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_sparse_step_of_dense_gradients, "does not support dense gradients"),
        (lambda: torch.optim.Muon([torch.nn.Parameter(torch.ones(2))]), "only supports 2D param"),
        (
            lambda: torch.optim.LBFGS([{"params": [torch.ones(2)]}, {"params": [torch.ones(1)]}]),
            "doesn't support per-parameter options",
        ),
        (lambda: lr_scheduler.LRScheduler(torch.optim.SGD([torch.ones(2)])), None),
    ],
    ids=["SparseAdam", "Muon", "LBFGS", "LRScheduler"],
)
def test_what_the_cases_leave_out_torch_itself_cannot_do(
    make: Callable[[], object], text: str | None
) -> None:
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=text):
        make()


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize(
    "amount",
    ["quick", "fsdp1", "layouts", "schedulers", *"0123"],
)
def test_sharded_training_is_the_same_saved_or_not_resumed_or_not(
    tmp_path: Path, amount: str
) -> None:
    run_cases(WORKER, 2, "all", tmp_path, amount)
