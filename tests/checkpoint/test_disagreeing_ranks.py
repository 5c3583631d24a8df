"""Real ranks of which one errs in a call: all raise at once, nothing mixes, the next call works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_fixture import StartRanks

import torch_dcpx as dcpx
from torch_dcpx.checkpoint import save as save_checkpoint
from torch_dcpx.errors import DcpxError, OptionError, PlanError, RankError
from torch_dcpx.options import WriteOptions

LONG_S = 600.0  # nobody waits so long


def state_of(number: int) -> dict[str, Any]:
    return {"x": torch.full((8,), float(number))}


def save(path: Path, number: int, **more: Any) -> Any:
    return dcpx.save(state_of(number), path, **more)


def loaded(path: Path) -> float:
    state = state_of(0)
    dcpx.load(state, path)
    return float(state["x"][0])


def all_can_save(root: Path, number: int) -> None:
    """The next call that all ranks make works, and is of one step."""
    path = root / f"after-{number}"
    save(path, number)
    assert loaded(path) == number
    dist.barrier()


def wrong_options_are_raised_on_all_ranks(root: Path, is_odd: bool) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: save(root / "a", 1, options=5 if is_odd else None),
        lambda: save(root / "a", 1, storage_writer=5 if is_odd else None),
        lambda: dcpx.async_save(state_of(1), root / "a", options=5 if is_odd else None),
        lambda: dcpx.load(state_of(1), root / "a", options=5 if is_odd else None),  # type: ignore[arg-type]
        lambda: dcpx.load(state_of(1), None if is_odd else root / "a"),
        lambda: save(None if is_odd else root / "a", 1),  # type: ignore[arg-type]
        lambda: dcpx.export(state_of(1), root / "e", options=5 if is_odd else None),  # type: ignore[arg-type]
        lambda: dcpx.load_pretrained(5 if is_odd else torch.nn.Linear(1, 1), root / "a"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises((DcpxError, AttributeError)):
            call()
    assert not (root / "a" / ".metadata").exists()
    all_can_save(root, 1)


def wrong_variable_is_raised_on_all_ranks(root: Path, is_odd: bool) -> None:
    names = ("DCPX_LOAD_TIMEOUT_S", "DCPX_SAVE_TIMEOUT_S")
    if is_odd:
        os.environ.update(dict.fromkeys(names, "soon"))
    there = root / "after-1"
    for call in (lambda: dcpx.load(state_of(1), there), lambda: save(root / "a", 1)):
        with pytest.raises(OptionError, match="TIMEOUT_S='soon'"):
            call()
    for name in names:
        os.environ.pop(name, None)
    all_can_save(root, 2)


@contextmanager
def interrupted_in(name: str) -> Iterator[None]:
    """Has a signal's handler raise inside of a function of save_checkpoint."""
    original = getattr(save_checkpoint, name)

    def signalled(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(*args)

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    setattr(save_checkpoint, name, signalled)
    try:
        yield
    finally:
        setattr(save_checkpoint, name, original)
        signal.signal(signal.SIGUSR1, before)


def interrupt_at_the_beginning_is_raised_on_all_ranks(root: Path, is_odd: bool) -> None:
    for name in ("_writer", "default_save_planner"):
        if is_odd:
            with pytest.raises(KeyboardInterrupt), interrupted_in(name):
                save(root / "b", 1)
        else:
            with pytest.raises(RankError, match=r"rank 1.*KeyboardInterrupt"):
                save(root / "b", 1)
    all_can_save(root, 3)


def save_of_one_rank_meets_no_other_call(root: Path, is_odd: bool) -> None:
    """`if rank == 0: save`, and then all go on."""
    save(root / "c", 7)
    call = (lambda: loaded(root / "c")) if is_odd else (lambda: save(root / "d", 8))
    with pytest.raises(PlanError, match=r"rank 1 is at .*, load of 'c'; rank 0 .*save of 'd'"):
        call()
    assert not (root / "d" / ".metadata").exists()
    assert loaded(root / "c") == 7
    all_can_save(root, 4)


def steps_do_not_mix(root: Path, is_odd: bool) -> None:
    """A rank that missed step 4 is at step 5 while the other is at step 4."""
    with pytest.raises(PlanError, match=r"rank 1 .*step-5', rank 0 .*step-4', which is another"):
        save(root / f"step-{5 if is_odd else 4}", 5 if is_odd else 4)
    assert not list(root.glob("step-*/.metadata"))
    all_can_save(root, 5)


def unlike_durability_is_raised_on_all_ranks(root: Path, is_odd: bool) -> None:
    """A checkpoint is durable where all of its files are."""
    options = WriteOptions(durability="none" if is_odd else "full")
    for call in (dcpx.save, dcpx.async_save):
        with pytest.raises(PlanError, match="durability='none'"):
            call(state_of(1), root / "e", options=options)
    assert not (root / "e" / ".metadata").exists()
    all_can_save(root, 6)


def one_rank_errs_in_each_call(root: Path) -> None:
    is_odd = dist.get_rank() == 1
    assert WriteOptions().save_timeout_s == LONG_S
    for check in (
        wrong_options_are_raised_on_all_ranks,
        wrong_variable_is_raised_on_all_ranks,
        interrupt_at_the_beginning_is_raised_on_all_ranks,
        save_of_one_rank_meets_no_other_call,
        steps_do_not_mix,
        unlike_durability_is_raised_on_all_ranks,
    ):
        check(root, is_odd)
        dist.barrier()


def test_ranks_that_err_in_a_call_all_raise_at_once_and_go_on(
    ranks: StartRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DCPX_SAVE_TIMEOUT_S", "DCPX_LOAD_TIMEOUT_S"):
        monkeypatch.setenv(name, str(LONG_S))
    ranks(2)(one_rank_errs_in_each_call, tmp_path)
