"""`resume` in which the caller's own code raises on one of two ranks: `test_resume_end.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.worker import rank_case
from trainings import Training, manager_of

from torch_dcpx import OptionError, PerRank, RankError, WriteOptions
from torch_dcpx.options import ReadOptions

OPTIONS = WriteOptions(
    durability="none", workers=1, slot_bytes=256 << 10, save_timeout_s=seconds(30)
)


class Part:
    """A data loader, a scheduler, or a `Stateful` value; raises `error` when it is loaded."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"position": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.loaded = state


class Call:
    """The arguments of one resume, of which one raises."""

    def __init__(self, where: str, error: BaseException | None) -> None:
        self.training = Training(1)
        self.parts = {
            name: Part(error if where == name else None)
            for name in ("lr_scheduler", "dataloader", "stateful")
        }
        self.own = PerRank("mine")
        self.merge_error = error if where == "merge" else None
        self.arguments = {
            "model": self.training.model,
            "optimizer": self.training.optimizer,
            "lr_scheduler": self.parts["lr_scheduler"],
            "dataloader": self.parts["dataloader"],
            "state": {"stateful": self.parts["stateful"], "own": self.own},
        }

    def merge(self, values: list[Any], rank: int, ranks: int) -> Any:
        if self.merge_error is not None:
            raise self.merge_error
        return values[0]

    @property
    def is_untouched(self) -> bool:
        is_loaded = any(part.loaded is not None for part in self.parts.values())
        return not is_loaded and self.own.value == "mine" and not self.training.optimizer.state


def save_by_one_rank(root: Path) -> None:
    call = Call("", None)
    call.training.gradients(1)
    call.training.optimizer.step()
    call.own.value = "saved"
    manager_of(root, no_dist=True).save(1, **call.arguments)


def an_error_of_one_rank_is_raised_on_all(root: Path) -> None:
    rank = dist.get_rank()
    manager = manager_of(
        root, options=OPTIONS, read_options=ReadOptions(load_timeout_s=seconds(30))
    )
    errors: tuple[Callable[[], BaseException], ...] = (
        lambda: KeyError("mine"), KeyboardInterrupt, SystemExit,
    )  # fmt: skip
    step = 1
    for where in ("merge", "stateful", "lr_scheduler", "dataloader"):
        for failing in (0, 1):
            for error in errors if where in ("merge", "dataloader") else errors[:1]:
                call = Call(where, error() if rank == failing else None)
                is_own = rank == failing and not isinstance(error(), Exception)
                kind = type(error()) if is_own else RankError
                with pytest.raises(kind) as raised:
                    manager.resume(**call.arguments, tag=1, merge=call.merge)
                if isinstance(raised.value, RankError):
                    assert raised.value.rank == failing
                    assert raised.value.original == f"builtins.{type(error()).__name__}"
                    assert type(raised.value.__cause__) is type(error())
                if where == "merge":
                    assert call.is_untouched, where
                step += 1
                if step % 5 == 0:
                    manager.save(step, state={"x": torch.zeros(3)})
                whole = Call("", None)
                manager.resume(**whole.arguments, tag=1, merge=whole.merge)
                assert all(part.loaded == {"position": 7} for part in whole.parts.values())
                assert whole.own.value == "saved" and len(whole.training.optimizer.state) == 4


def a_merge_that_cannot_be_called_is_refused_on_all_before_anything_is_read(root: Path) -> None:
    manager = manager_of(
        root, options=OPTIONS, read_options=ReadOptions(load_timeout_s=seconds(30))
    )
    call = Call("", None)
    merges: list[Any] = [{"dataloader": None}, {1: call.merge}, "first"]
    for merge in merges:
        given = merge if dist.get_rank() == 1 else call.merge
        with pytest.raises(OptionError, match=r"rank 1.*merge must be a function"):
            manager.resume(**call.arguments, tag=1, merge=given)
        assert call.is_untouched


@rank_case()
def main(root: Path) -> None:
    if dist.get_rank() == 0:
        save_by_one_rank(root)
    dist.barrier()
    an_error_of_one_rank_is_raised_on_all(root)
    a_merge_that_cannot_be_called_is_refused_on_all_before_anything_is_read(root)
