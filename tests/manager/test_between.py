"""What fails on one of two ranks in a manager's call fails on both, and the next calls work."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.rank_fixture import StartRanks
from support.states import assert_same
from torch import nn
from trainings import Held, Training, damage, fully_sharded, large, manager_of

import torch_dcpx as dcpx

pytestmark = pytest.mark.multirank


def timed(root: Path, **more: Any) -> Any:
    """A manager whose calls end soon where a rank is missed."""
    limit_s = seconds(30)
    options = dcpx.WriteOptions(
        durability="none", workers=1, slot_bytes=256 << 10, save_timeout_s=limit_s
    )
    reads = dcpx.ReadOptions(load_timeout_s=limit_s)
    return manager_of(root, options=options, read_options=reads, **more)


def raised_on_both(call: Callable[[], Any], failing: int, error: BaseException) -> None:
    is_own = dist.get_rank() == failing and not isinstance(error, Exception)
    with pytest.raises(type(error) if is_own else dcpx.RankError) as raised:
        call()
    if isinstance(raised.value, dcpx.RankError):
        assert raised.value.rank == failing
        assert raised.value.original == f"builtins.{type(error).__name__}"
        assert type(raised.value.__cause__) is type(error)


class Model(torch.nn.Linear):
    """Raises `error` when its modules are asked for: as the state or the target is made."""

    error: BaseException | None = None

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[torch.nn.Module]:
        if self.error is not None:
            raise self.error
        return super().modules(*args, **kwargs)


def what_raises_between_two_exchanges(root: Path) -> None:
    model = Model(3, 3)
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for step, is_async, failing, error in (
        (1, False, 1, ValueError("mine")),
        (2, True, 0, KeyboardInterrupt()),
    ):
        manager = timed(root, async_save=is_async)
        manager.save(step, **parts)
        manager.wait()
        model.error = error if dist.get_rank() == failing else None
        raised_on_both(lambda m=manager, s=step: m.save(s, **parts), failing, error)
        assert not manager._retention.busy
        raised_on_both(lambda m=manager: m.resume(**parts), failing, error)
        model.error = None
        assert manager.resume(**parts).tag == f"step-{step}"
        with manager:
            manager.save(step, **parts)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 2)
    with pytest.raises(
        dcpx.MismatchError, match=r"resume from .*: lr_scheduler was not saved there"
    ):
        manager_of(root).resume(model=model, lr_scheduler=scheduler)
    assert manager_of(root).resume(model=model).tag == "step-2"


def test_error_between_two_exchanges_is_raised_on_all_ranks(
    ranks: StartRanks, tmp_path: Path
) -> None:
    ranks(2)(what_raises_between_two_exchanges, tmp_path)


class Part(Held):
    """A data loader, a scheduler, or a `Stateful` value; raises `error` when it is loaded."""

    error: BaseException | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        super().load_state_dict(state)


class Call:
    """The arguments of one resume, of which one raises."""

    def __init__(self, where: str = "", error: BaseException | None = None) -> None:
        self.training, self.own = Training(1), dcpx.PerRank("mine")
        names = ("lr_scheduler", "dataloader", "stateful")
        self.parts = {name: Part(position=7) for name in names}
        if where in names:
            self.parts[where].error = error
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

    def resume(self, manager: Any) -> Any:
        return manager.resume(**self.arguments, tag=1, merge=self.merge)

    @property
    def is_untouched(self) -> bool:
        is_loaded = any(part.taken for part in self.parts.values())
        return not is_loaded and self.own.value == "mine" and not self.training.optimizer.state


def whole_calls_work(manager: Any) -> None:
    whole = Call()
    whole.resume(manager)
    assert all(part.taken == [{"position": 7}] for part in whole.parts.values())
    assert whole.own.value == "saved" and len(whole.training.optimizer.state) == 4


def what_raises_at_the_end_of_a_resume(root: Path) -> None:
    rank = dist.get_rank()
    if rank == 0:
        call = Call()
        call.training.gradients(1)
        call.training.optimizer.step()
        call.own.value = "saved"
        manager_of(root, no_dist=True).save(1, **call.arguments)
    dist.barrier()
    manager, step = timed(root), 1
    kinds: tuple[Callable[[], BaseException], ...] = (KeyError, KeyboardInterrupt, SystemExit)
    for where in ("merge", "stateful", "lr_scheduler", "dataloader"):
        for failing in (0, 1):
            for error in kinds if where in ("merge", "dataloader") else kinds[:1]:
                call = Call(where, error() if rank == failing else None)
                raised_on_both(lambda c=call: c.resume(manager), failing, error())  # type: ignore[misc]
                assert where != "merge" or call.is_untouched
                step += 1
                if step % 5 == 0:
                    manager.save(step, state={"x": torch.zeros(3)})
                whole_calls_work(manager)
    call = Call()
    merges: list[Any] = [{"dataloader": None}, {1: call.merge}, "first"]
    for merge in merges:
        given = merge if rank == 1 else call.merge
        with pytest.raises(dcpx.OptionError, match=r"rank 1.*merge must be a function"):
            manager.resume(**call.arguments, tag=1, merge=given)
        assert call.is_untouched


@pytest.mark.slow
def test_what_one_rank_raises_all_raise_and_go_on(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2)(what_raises_at_the_end_of_a_resume, tmp_path)


def signals_that_cannot_be_watched(root: Path) -> None:
    manager, own = manager_of(root), signal.SIGUSR1
    before = signal.getsignal(own)
    raised: list[BaseException] = []

    def on_another_thread() -> None:
        try:
            manager.save_on_signal([own])
        except dcpx.OptionError as error:
            raised.append(error)

    wrong: list[Any] = [[own, signal.SIGKILL], [own, 1 << 20], [own, -1], [], ["SIGUSR1"], 3, None]
    for failing in (0, 1):
        for signals in wrong:
            given = signals if dist.get_rank() == failing else [own]
            with pytest.raises(dcpx.OptionError, match=f"^rank {failing} .*signals"):
                manager.save_on_signal(given)
            assert signal.getsignal(own) is before
        if dist.get_rank() == failing:
            thread = threading.Thread(target=on_another_thread)
            thread.start()
            thread.join()
        else:
            with pytest.raises(dcpx.OptionError) as caught:
                manager.save_on_signal([own])
            raised.append(caught.value)
        assert f"rank {failing} " in str(raised[-1]) and "main thread" in str(raised[-1])
        assert signal.getsignal(own) is before
    with manager.save_on_signal([own, own]) as watch:
        assert signal.getsignal(own) is not before
        watch.signalled()
        assert [watch.requested(step) for step in range(3)].count(True) == 1
    assert signal.getsignal(own) is before
    assert manager.latest() is None


def test_wrong_signals_on_one_rank_are_an_error_on_all(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2)(signals_that_cannot_be_watched, tmp_path)


def state_of(value: float) -> dict[str, Any]:
    """A tensor of each rank's own."""
    return {f"x{dist.get_rank()}": large(value)}


def saved(root: Path, *steps: int) -> Path:
    manager = manager_of(root)
    for step in steps:
        manager.save(step, state=state_of(step))
    dist.barrier()
    return root


def damaged(root: Path, step: int, rank: int) -> Path:
    """Damages what one rank wrote; all get the file's name."""
    file = sorted((root / f"step-{step}").glob(f"__{rank}_*.distcp"))[0]
    dist.barrier()
    if dist.get_rank() == 0:
        damage(root / f"step-{step}", rank)
    dist.barrier()
    return file


def all_ranks_fall_back(root: Path, rank: int) -> None:
    file, state, heard = damaged(saved(root, 1, 2), 2, rank), state_of(0), logging.Handler()
    warnings: list[Any] = []
    heard.emit = warnings.append  # type: ignore[method-assign]
    heard.setLevel(logging.WARNING)
    logging.getLogger("torch_dcpx").addHandler(heard)
    info = manager_of(root).resume(state=state)
    logging.getLogger("torch_dcpx").removeHandler(heard)
    assert (info.tag, info.step) == ("step-1", 1)
    assert [over[:2] for over in info.passed_over] == [("step-2", str(file))]
    assert set(next(iter(state.values())).tolist()) == {1.0}
    assert len(warnings) == (1 if dist.get_rank() == 0 else 0), warnings


def all_ranks_hear_that_nothing_is_good(root: Path) -> None:
    files = [damaged(saved(root, step), step, step % 2) for step in (1, 2)]
    with pytest.raises(dcpx.CorruptionError) as info:
        manager_of(root).resume(state=state_of(0))
    assert all(str(file) in str(info.value) for file in files)
    with pytest.raises(dcpx.CorruptionError, match="step-2"):
        manager_of(root).resume(state=state_of(0), fallback=False)
    with pytest.raises(dcpx.PlanError, match="rank 1: fallback=False where rank 0 has True"):
        manager_of(root).resume(state=state_of(0), fallback=dist.get_rank() == 0)


def what_one_rank_would_keep_is_an_error_on_all(root: Path) -> None:
    manager = manager_of(saved(root, 1))
    more = {**state_of(2), **({"y": large(2)} if dist.get_rank() == 1 else {})}
    manager.save(2, state=more)
    dist.barrier()
    damaged(root, 2, 1)
    for forgiven in ({"strict": False}, {"allow_missing": ["state.y"]}):
        with pytest.raises(dcpx.CorruptionError, match=r"does not hold state\.y"):
            manager.resume(state=more, **forgiven)
    with pytest.raises(dcpx.CorruptionError, match=r"state\.y") as info:
        manager.resume(state=more)
    assert isinstance(info.value.__cause__, dcpx.MismatchError)
    assert manager.resume(state=state_of(0)).tag == "step-1"


def test_ranks_fall_back_together_whoever_reads_damage(ranks: StartRanks, tmp_path: Path) -> None:
    for rank in (0, 1):
        ranks(2)(all_ranks_fall_back, tmp_path / f"of-{rank}", rank)
    ranks(2)(all_ranks_hear_that_nothing_is_good, tmp_path / "none")
    ranks(2)(what_one_rank_would_keep_is_an_error_on_all, tmp_path / "more")


def sharded(device: str) -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    return fully_sharded(model)


def parts_of(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def shards_on_meta_are_refused_and_filled_once_they_have_memory(root: Path) -> None:
    saved = parts_of(sharded("cpu"))
    saved["model"](torch.ones(2, 8)).sum().backward()
    saved["optimizer"].step()
    manager_of(root).save(1, **saved)
    model, manager = sharded("meta"), manager_of(root)
    for parts in ({"model": model}, parts_of(model)):
        with pytest.raises(dcpx.UnsupportedError, match=r"'model\.0\.weight'.*to_empty"):
            manager.resume(**parts)
    assert all(one.is_meta for one in model.parameters())
    model.to_empty(device="cpu")
    parts = parts_of(model)
    assert manager.resume(**parts).tag == "step-1"
    assert_same(model.state_dict(), saved["model"].state_dict())
    assert len(parts["optimizer"].state) == 4
    other = sharded("meta")
    dcpx.load_pretrained(other, str(root / "step-1"))
    assert_same(other.state_dict(), saved["model"].state_dict())


def meta_on_one_rank_is_an_error_on_all(root: Path) -> None:
    model, manager = nn.Linear(3, 3), manager_of(root)
    manager.save(1, model=model, state={"m": model})
    dcpx.save({"m": model}, root / "plain")
    with torch.device("meta" if dist.get_rank() == 1 else "cpu"):
        own = nn.Linear(3, 3)
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r"state\.m\.weight", lambda: manager.resume(state={"m": own})),
        (r"state\.m\.weight", lambda: manager.resume(state={"m": own.state_dict()})),
        (r"model\.weight", lambda: manager.resume(model=own)),
        (r"m\.weight", lambda: dcpx.load({"m": own}, root / "plain")),
    ]
    for name, call in calls:
        with pytest.raises(dcpx.UnsupportedError, match=rf"^rank 1 .* on meta.*'{name}'"):
            call()
    dcpx.save({"w": torch.ones(3), "n": [torch.ones(2)]}, root / "dict")
    state = {"w": torch.empty(3, device="meta"), "n": [torch.empty(2, device="meta")]}
    dcpx.load(state, root / "dict")  # tensors in a dict get memory, as with stock
    assert_same(state, {"w": torch.ones(3), "n": [torch.ones(2)]})


def test_ranks_refuse_together_what_is_on_meta_on_any(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2)(shards_on_meta_are_refused_and_filled_once_they_have_memory, tmp_path / "sharded")
    ranks(2)(meta_on_one_rank_is_an_error_on_all, tmp_path / "one")


def changes_through_links(root: Path) -> None:
    manager = manager_of(root)
    before = sorted(path.name for path in (*root.iterdir(), *(root / "step-300").iterdir()))
    dist.barrier()
    calls = (manager.pin, manager.unpin, manager.delete)
    for tag, target in (("latest", "step-300"), ("gone", "step-9")):
        for call in (lambda tag: manager.save(tag, state={"x": torch.zeros(3)}), *calls):
            with pytest.raises(dcpx.UnsupportedError, match=f"{tag}.*link to '{target}'"):
                call(tag)
    assert before == sorted(path.name for path in (*root.iterdir(), *(root / "step-300").iterdir()))
    state = {"x": torch.zeros(3)}
    assert manager.resume(state=state, tag="latest").step == 300
    manager.save(301, state=state)
    assert manager.tags() == ["step-300", "step-301"]


def test_change_through_a_link_is_refused_on_all_ranks(ranks: StartRanks, tmp_path: Path) -> None:
    manager_of(tmp_path).save(300, state={"x": torch.zeros(3)})
    (tmp_path / "latest").symlink_to("step-300")
    (tmp_path / "gone").symlink_to("step-9")
    ranks(2)(changes_through_links, tmp_path)
