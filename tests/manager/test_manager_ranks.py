"""The manager on two ranks, FSDP2 on the CPU, and what they saved on three."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.machine import seconds
from support.no_collectives import no_collectives
from support.rank_fixture import StartRanks
from support.states import assert_same
from torch.nn.parallel import DistributedDataParallel
from trainings import Called, Held, fully_sharded

from torch_dcpx import (
    CheckpointManager,
    DcpxError,
    MismatchError,
    OptionError,
    PerRank,
    PlanError,
    RankError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.manager import root as manager_root

FAST = WriteOptions(durability="none", workers=1, slot_bytes=256 << 10, save_timeout_s=seconds(60))


def manager_of(root: Path, **kwargs: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"options": FAST, **kwargs})


class Training:
    def __init__(self, seed: int, wrap: str = "fsdp") -> None:
        torch.manual_seed(seed)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Linear(13, 4))
        self.model[0].bias.requires_grad_(False)
        if wrap == "fsdp":
            fully_sharded(self.model)
        elif wrap == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = Held(position=0)

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "dataloader": self.loader,
        }

    def train(self, step: int) -> float:
        generator = torch.Generator().manual_seed(step)  # the same batch on every rank
        self.optimizer.zero_grad()
        loss = self.model(torch.rand(6, 8, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.loader.values["position"] += 1 + dist.get_rank()
        return loss.item()


def resumed_training_equals_the_uninterrupted(root: Path) -> None:
    rank = dist.get_rank()
    first = Training(0)
    with manager_of(root / "fsdp", keep_last=1) as manager:
        for step in (1, 2):
            first.train(step)
            manager.save(step, **first.parts, user_content={"step": step, "rng": PerRank([rank])})
        expected = [first.train(step) for step in (3, 4)]
    again = Training(1)
    manager = manager_of(root / "fsdp")
    with no_collectives():
        assert manager.tags() == ["step-2"]
    info = manager.resume(**again.parts)
    assert (info.tag, info.step) == ("step-2", 2)
    assert info.user_content == {"step": 2, "rng": [rank]}
    assert again.loader.values["position"] == 2 * (1 + rank)
    assert [again.train(step) for step in (3, 4)] == expected


def ddp_and_plain_models_share_their_names(root: Path) -> None:
    ddp, plain = Training(0, "ddp"), Training(1, "plain")
    ddp.train(1)
    with manager_of(root / "ddp") as manager:
        manager.save(1, model=ddp.model, optimizer=ddp.optimizer)
    manager_of(root / "ddp").resume(model=plain.model, optimizer=plain.optimizer)
    assert_same(ddp.model.module.state_dict(), plain.model.state_dict())


def other_calls_are_refused_on_every_rank_before_the_first_byte(root: Path) -> None:
    is_odd = dist.get_rank() == 1
    training = Training(0)
    manager = manager_of(root / "none")
    calls: list[tuple[type[DcpxError], str, Any, dict[str, Any]]] = [
        (PlanError, "rank 1 is at .*save of 'odd'; rank 0", "odd" if is_odd else "even", {}),
        (PlanError, "rank 1: .*step=7", "a", {"step": 7 if is_odd else 8}),
        (PlanError, "rank 1: model=nothing", 1, {} if is_odd else {"model": training.model}),
        (PlanError, "per_rank", 1, {"user_content": PerRank(1) if is_odd else 1}),
        (UnsupportedError, "rank 1.*user_content.f", 1, {"user_content": {"f": is_odd and print}}),
        (RankError, "rank 1.*no state", 1, {"state": {"x": failing(is_odd)}}),
    ]
    for kind, text, tag, arguments in calls:
        with pytest.raises(kind, match=text):
            manager.save(tag, **{"user_content": 0, **arguments})
    with pytest.raises(PlanError, match=r"rank 1 is at call .*latest of .*; rank 0 .*tags of "):
        manager.latest() if is_odd else manager.tags()
    with pytest.raises(PlanError, match=r"rank 1 is at call .*resume of .*; rank 0 .*save of "):
        manager.resume() if is_odd else manager.save(1, user_content=0)
    with pytest.raises(
        PlanError, match=r"rank 1 is at .*save_on_signal of .*; rank 0 .*latest of "
    ):
        manager.save_on_signal() if is_odd else manager.latest()
    with pytest.raises(PlanError, match=r"rank 1: per_rank=\['state.x'\] where rank 0 has \[\]"):
        manager.resume(state={"x": PerRank(0) if is_odd else 0})
    with pytest.raises(DcpxError, match="step-9"):
        manager.pin(9)
    dist.barrier()
    assert not list(root.glob("none/*/.metadata"))
    assert manager.latest() is None


def ranks_agree_when_to_save(root: Path) -> None:
    is_odd = dist.get_rank() == 1
    value = {"x": torch.zeros(3)}
    with manager_of(root / "due", save_every=3, save_every_s=0.001) as manager:
        saved = []
        for step in range(1, 8):
            if manager.should_save(step):
                saved.append(step)
                handle = manager.save(step, state=value)
    report = handle.result(seconds(60))
    assert report is not None and report.ranks == 2
    steps: list[Any] = [None, None]
    dist.all_gather_object(steps, saved)
    assert steps[0] == steps[1] and len(saved) >= 2
    manager = manager_of(root / "due", save_every=3)
    with pytest.raises(PlanError, match=r"rank 1 is at .*save of 'step-9'; rank 0 .*should_save"):
        manager.save(9, state=value) if is_odd else manager.should_save(9)
    with pytest.raises(PlanError, match="rank 1: step=8 where rank 0 has 9"):
        manager.should_save(8 if is_odd else 9)
    with pytest.raises(PlanError, match="rank 1: save_every=4 where rank 0 has 3"):
        manager_of(root / "due", save_every=4 if is_odd else 3).should_save(9)
    with pytest.raises(OptionError, match=r"rank 1.*no part was given"):
        manager.save(9, state=None if is_odd else value)
    with no_collectives():
        assert not manager.should_save(8) and manager.should_save(9)


def signal_of_one_rank_makes_a_save_due_on_both(root: Path) -> None:
    with manager_of(root / "signal") as manager:
        watch = manager.save_on_signal([signal.SIGUSR2], time_left_s=600)
        answers = []
        for step in range(1, 6):
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            is_due = manager.should_save(step)
            assert watch.requested(step) is is_due
            answers.append(is_due)
            if is_due:
                manager.save(step, state={"x": torch.zeros(3)})
            dist.barrier()
    assert answers.count(True) == 1 and answers.index(True) in (2, 3)


def save_to_a_pinned_tag_is_refused_on_every_rank(root: Path) -> None:
    manager = manager_of(root / "pinned")
    manager.save("kept", state={"x": torch.ones(3)})
    manager.wait()
    manager.pin("kept")
    with pytest.raises(UnsupportedError, match="kept': it is pinned"):
        manager.save("kept", state={"x": torch.zeros(3)})
    state = {"x": torch.zeros(3)}
    assert manager.resume(state=state, tag="kept").step == 0 and state["x"].all()


def failing(fails: bool) -> Called:
    """Its state fails on one rank, while the ranks plan."""

    def state() -> dict[str, Any]:
        if fails:
            raise KeyError("no state")
        return {"a": 1}

    return Called(state)


def one_rank_lists_where_the_pointer_is_broken(root: Path) -> None:
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        (root / "fsdp" / "newest").write_text("torn")
    dist.barrier()
    listings = []
    listed = manager_root.ManagerRoot.listed
    manager_root.ManagerRoot.listed = lambda self: listings.append(1) or listed(self)  # type: ignore
    info = manager_of(root / "fsdp").resume()
    manager_root.ManagerRoot.listed = listed  # type: ignore[method-assign]
    assert info.tag == "step-2"
    assert len(listings) == (1 if rank == 0 else 0)


def a_merge_is_asked_for_where_ranks_changed(root: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, expected = Training(1), Training(0)
    for step in (1, 2):
        expected.train(step)
    manager = manager_of(root / "fsdp")
    with pytest.raises(MismatchError, match=r"'dataloader', 'user_content\.rng' .*of 2 ranks"):
        manager.resume(**training.parts)
    calls = []

    def merge(values: list[Any], own: int, ranks: int) -> Any:
        calls.append((own, ranks))
        return values[min(own, 1)]

    info = manager.resume(**training.parts, merge=merge)
    assert info.user_content == {"step": 2, "rng": [min(rank, 1)]}
    assert training.loader.values["position"] == 2 * (1 + min(rank, 1))
    assert calls == [(rank, world_size)] * 2
    for name, value in expected.model.state_dict().items():
        found = training.model.state_dict()[name].full_tensor()
        torch.testing.assert_close(found, value.full_tensor())  # two ranks trained it


SAVES = (
    resumed_training_equals_the_uninterrupted,
    ddp_and_plain_models_share_their_names,
    other_calls_are_refused_on_every_rank_before_the_first_byte,
    ranks_agree_when_to_save,
    signal_of_one_rank_makes_a_save_due_on_both,
    save_to_a_pinned_tag_is_refused_on_every_rank,
    one_rank_lists_where_the_pointer_is_broken,
)


@pytest.mark.slow
@pytest.mark.multirank
def test_two_ranks_save_and_resume_and_three_resume(ranks: StartRanks, tmp_path: Path) -> None:
    for case in SAVES:
        ranks(2)(case, tmp_path)
    ranks(3)(a_merge_is_asked_for_where_ranks_changed, tmp_path)
