"""Manager calls in which one of two ranks raises between two exchanges: `test_between.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.worker import rank_case
from trainings import manager_of

from torch_dcpx import MismatchError, RankError, WriteOptions
from torch_dcpx.options import ReadOptions

OPTIONS = WriteOptions(
    durability="none", workers=1, slot_bytes=256 << 10, save_timeout_s=seconds(20)
)


class Model(torch.nn.Linear):
    """Raises `error` when its modules are asked for: as the state or the target is made."""

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__(3, 3)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[torch.nn.Module]:
        if self.error is not None:
            raise self.error
        return super().modules(*args, **kwargs)


def raised_on_all(call: Callable[[], Any], failing: int, error: BaseException) -> None:
    is_own = dist.get_rank() == failing and not isinstance(error, Exception)
    with pytest.raises(type(error) if is_own else RankError) as raised:
        call()
    if isinstance(raised.value, RankError):
        assert (raised.value.rank, raised.value.original) == (
            failing, f"builtins.{type(error).__name__}",
        )  # fmt: skip


def what_raises_on_one_rank_between_exchanges_raises_on_all(root: Path) -> None:
    model = Model()
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    reads = ReadOptions(load_timeout_s=seconds(20))
    for step, is_async, failing, error in (
        (1, False, 1, ValueError("mine")),
        (2, True, 0, KeyboardInterrupt()),
    ):
        manager = manager_of(root, options=OPTIONS, read_options=reads, async_save=is_async)
        manager.save(step, **parts)
        manager.wait()
        model.error = error if dist.get_rank() == failing else None
        raised_on_all(lambda m=manager, s=step: m.save(s, **parts), failing, error)
        assert not manager._retention.busy
        raised_on_all(lambda m=manager: m.resume(**parts), failing, error)
        model.error = None
        assert manager.resume(**parts).tag == f"step-{step}"
        with manager:
            manager.save(step, **parts)


def what_was_not_saved_is_the_same_error_on_all_and_the_next_call_works(root: Path) -> None:
    manager = manager_of(root, options=OPTIONS)
    model = Model()
    manager.save(1, model=model)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 2)
    with pytest.raises(MismatchError, match=r"resume from .*: lr_scheduler was not saved there"):
        manager.resume(model=model, lr_scheduler=scheduler)
    assert manager.resume(model=model).tag == "step-1"


@rank_case()
def main(root: Path) -> None:
    what_raises_on_one_rank_between_exchanges_raises_on_all(root / "one")
    what_was_not_saved_is_the_same_error_on_all_and_the_next_call_works(root / "all")
