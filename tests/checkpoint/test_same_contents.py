"""What differs over the ranks under one name, found while ranks plan a save: contents are said, and
another thing is refused.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plan_states import as_rank, mesh_of, plan_all
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_dcpx import DcpxSavePlanner, DcpxWriter, PlanError
from torch_dcpx.checkpoint import same_contents
from torch_dcpx.checkpoint.save_plan import PlanRound
from torch_dcpx.errors import StagingError
from torch_dcpx.planners.cache import PlanCache
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.contents import content_sums

State = dict[str, Any]
Of = Callable[[int], State]


class Group:
    """Ranks that save again and again, in one process, each with the plans that it has kept."""

    def __init__(self, path: Path, ranks: int = 2, planner: Any = None, **options: Any) -> None:
        self.path, self.ranks = path, ranks
        self.kind, self.options = planner or DcpxSavePlanner, options
        self.plans = [PlanCache() for _ in range(ranks)]
        self.logged: set[str] = set()
        self.bytes = 0  # of the offers of the first round

    def _round(self, rank: int, state: Of) -> PlanRound:
        planner = self.kind(**self.options)
        if isinstance(planner, DcpxSavePlanner):
            planner.dcpx_planning.plans = self.plans[rank]
            planner.dcpx_logged = self.logged
        with as_rank(rank, self.ranks):
            planner.set_up_planner(state(rank), is_coordinator=rank == 0)
        writer = DcpxWriter(self.path)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        return PlanRound(planner, writer, rank, self.ranks, "all")

    def save(self, state: Of) -> tuple[int, list[Any]]:
        """Returns (rounds, plan of each rank)."""
        each = [self._round(rank, state) for rank in range(self.ranks)]
        offers = [self._called(rank, one.offer) for rank, one in enumerate(each)]
        self.bytes = len(pickle.dumps(offers[0]))
        answers = each[0].answer("id", sent(offers))
        rounds = 1
        if answers[0].is_again:
            rounds = 2
            offers = [self._called(rank, one.offer_again) for rank, one in enumerate(each)]
            answers = each[0].answer("id", sent(offers))
        return rounds, [one.finish(own) for one, own in zip(each, sent(answers), strict=True)]

    def _called(self, rank: int, call: Callable[[], Any]) -> Any:
        with as_rank(rank, self.ranks):
            return call()


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def names(plan: Any) -> set[str]:
    return {item.index.fqn for item in plan.items}


def other_bits(number: int) -> torch.Tensor:
    """NaN and zero in bits of several sorts."""
    return torch.tensor([(0x7FC00000, 0, 5), (-1, -(1 << 31), 5)][number]).int().view(torch.float32)


CASES: dict[str, tuple[Callable[[int], torch.Tensor], bool]] = {
    "weights": (lambda r: torch.full((4, 4), 10.0 * r), True),
    "equal weights": (lambda _: torch.arange(9.0), False),
    "large": (lambda r: torch.zeros(1 << 18) + r, True),
    "equal large": (lambda _: torch.arange(1 << 18), False),
    "a step": (lambda r: torch.tensor(3.0 + r), True),
    "a count": (lambda r: torch.tensor(7 + r), True),
    "an equal step": (lambda _: torch.tensor(3.0), False),
    "bytes": (lambda r: torch.full((64,), r, dtype=torch.uint8), True),
    "truths": (lambda r: torch.tensor([True, bool(r)]), True),
    "nothing": (lambda _: torch.empty(0, 3), False),
    "bits of NaN": (other_bits, False),
    "half": (lambda r: torch.full((5,), 1.0 + r, dtype=torch.bfloat16), True),
    "complex": (lambda r: torch.tensor([1.0 + 2j * r]), True),
    "columns": (lambda r: (torch.arange(12.0) + r).view(3, 4).t(), True),
    "equal in another layout": (
        lambda r: torch.arange(6.0).view(3, 2).t() if r else torch.tensor([[0.0, 2, 4], [1, 3, 5]]),
        False,
    ),
    "an equal view": (lambda r: torch.arange(9.0 + r)[r:] - r, False),
    "a parameter": (lambda r: torch.nn.Parameter(torch.ones(3) * r), True),
}


@pytest.mark.parametrize("kind", [DcpxSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("case", CASES)
def test_other_contents_under_one_name_are_said_and_equal_ones_are_not(
    case: str, kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, differs = CASES[case]
    own = f"{case} of {kind.__name__}"

    def state(rank: int) -> State:
        return {own: make(rank), "tied": make(rank), "same": torch.ones(3), f"r{rank}": make(rank)}

    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        _, plans = Group(tmp_path, planner=kind).save(state)
    if not differs:
        assert not caplog.records
        return
    (text,) = [record.getMessage() for record in caplog.records]
    assert "tensors differ over the ranks under one name" in text
    assert f"'{own}' (ranks 0, 1 of the group)" in text
    assert "a name of its own" in text and "PerRank" in text
    if kind is DcpxSavePlanner:
        assert text.startswith("2 tensors") and {own, "tied"} <= names(plans[0])
        assert not {own, "tied"} & names(plans[1])


def test_lowest_rank_keeps_all_that_differs(tmp_path: Path) -> None:
    def state(rank: int) -> State:
        return {f"expert{n}": torch.full((100,), 10.0 * rank + n) for n in range(8)}

    group = Group(tmp_path, ranks=3, split_replicas=True)
    _, plans = group.save(state)
    assert [len(names(plan)) for plan in plans] == [8, 0, 0]  # else they were shared out
    rounds, plans = group.save(state)
    assert rounds == 1 and [len(names(plan)) for plan in plans] == [8, 0, 0]


def test_on_conflict_error_refuses_them(tmp_path: Path) -> None:
    group = Group(tmp_path, on_conflict="error")
    for _ in range(2):
        with pytest.raises(PlanError, match=r"1 tensors differ .* 'w' \(ranks 0, 1 of") as caught:
            group.save(lambda rank: {"w": torch.ones(3) * rank, "same": torch.ones(2)})
        assert caught.value.fqn == "w"
    assert group.save(lambda _: {"w": torch.ones(3)})[0] == 1


def test_kept_plan_finds_what_began_to_differ_and_says_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"a": 1.0, "b": 2.0}
    group = Group(tmp_path, ranks=3)

    def state(rank: int) -> State:
        own = {name: torch.full((5,), value) for name, value in values.items()}
        return {**own, "c": torch.full((5,), drift * rank), f"of {rank}": torch.full((5,), rank)}

    drift = 0.0
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        assert group.save(state)[0] == 1
        values["a"], values["b"] = values["b"], values["a"] * 3  # as a training changes them
        assert group.save(state)[0] == 1 and not caplog.records
        kept_bytes = group.bytes  # the same, whatever the values
        assert group.save(state)[0] == 1 and group.bytes == kept_bytes < 200
        drift = 1.0
        rounds, plans = group.save(state)
        assert rounds == 2 and "c" in names(plans[0])
        assert [record.getMessage().split(";")[0] for record in caplog.records] == [
            "1 tensors differ over the ranks under one name, of which a checkpoint keeps one: "
            "'c' (ranks 0, 1, 2 of the group)"
        ]
        assert group.save(state)[0] == 1  # it is known
    assert len(caplog.records) == 1


def test_contents_that_change_names_are_found_by_a_kept_plan(tmp_path: Path) -> None:
    def state(rank: int) -> State:
        values = (1.0, 2.0) if rank == 0 or not is_swapped else (2.0, 1.0)
        return {f"e{n}": torch.full((5,), value) for n, value in enumerate(values)}

    group, is_swapped = Group(tmp_path, on_conflict="error"), False
    group.save(state)
    is_swapped = True
    with pytest.raises(PlanError, match="2 tensors differ"):
        group.save(state)


def test_names_of_some_ranks_are_compared_among_these(tmp_path: Path) -> None:
    """As stages of a pipeline have them: two ranks each, and a name that all have."""

    def state(rank: int) -> State:
        stage = {f"s{rank // 2}.w{n}": torch.full((3,), float(rank // 2)) for n in range(3)}
        bad = {"s1.w0": torch.full((3,), drift)} if rank == 3 else {}
        return {**stage, **bad, "step": torch.tensor(1.0), f"of {rank}": torch.tensor(rank)}

    group, drift = Group(tmp_path, ranks=4, on_conflict="error"), 1.0
    assert [group.save(state)[0] for _ in range(3)] == [1, 1, 1]
    drift = 5.0
    with pytest.raises(PlanError, match=r"'s1.w0' \(ranks 2, 3 of the group\)"):
        group.save(state)


def test_of_many_tensors_each_save_looks_at_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_contents, "_MOST_A_SAVE", 4)
    looked: list[int] = []

    def noting(names: Any, tensors: Any) -> bytearray:
        looked.append(len(names))
        return content_sums(names, tensors)

    monkeypatch.setattr(same_contents, "content_sums", noting)

    def state(rank: int) -> State:
        return {f"w{n}": torch.full((3,), drift * rank + n) for n in range(20)}

    group, drift = Group(tmp_path, on_conflict="error"), 0.0
    assert group.save(state)[0] == 1 and looked == [20, 20]
    for _ in range(2):
        looked.clear()
        assert [group.save(state)[0] for _ in range(5)] == [1] * 5
        assert sum(looked) == 40 and max(looked) < 20
    drift = 1.0

    def five_saves() -> None:
        for _ in range(5):
            group.save(state)

    with pytest.raises(PlanError, match="20 tensors differ"):
        five_saves()


def test_tensors_on_a_device_are_compared_when_ranks_plan_anew_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def state(rank: int) -> State:
        return {
            "w": torch.full((50, 90), drift * rank).t(),
            "step": torch.tensor(1.0 + drift * rank),
        }

    monkeypatch.setattr(device_memory, "is_host", lambda one: one.dim() < 2)
    group, drift = Group(tmp_path), 0.0
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        assert group.save(state)[0] == 1
        drift = 1.0
        assert group.save(state)[0] == 1 and not caplog.records
        Group(tmp_path).save(state)
    assert "'w' (ranks 0, 1 of the group), 'step'" in caplog.text


def test_failure_of_a_device_is_the_saves_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: Any) -> None:
        raise StagingError("a current stream is capturing a graph")

    monkeypatch.setattr(device_memory, "is_host", lambda _: False)
    monkeypatch.setattr(device_memory, "source_events", failing)
    with pytest.raises(StagingError, match="capturing"):
        Group(tmp_path).save(lambda _: {"w": torch.ones(3)})


def test_one_rank_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_contents, "content_sums", None)
    group = Group(tmp_path, ranks=1)
    for _ in range(2):
        rounds, plans = group.save(lambda _: {"w": torch.ones(3)})
        assert rounds == 1 and names(plans[0]) == {"w"}


def test_meshes_of_some_ranks_are_compared_and_one_of_all_is_not(tmp_path: Path) -> None:
    """Ranks 0 and 2 share an expert's rows, and ranks 1 and 3 those of another one."""

    def on_parts(rank: int) -> State:
        mesh = DeviceMesh("cpu", [[0, 2], [1, 3]][rank % 2], _init_backend=False)
        local = torch.full((2, 3), 1.0 + rank // 2 + apart * (rank % 2))  # rows of their own
        return {
            "e": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
            "own": torch.ones(1),
        }

    def on_all(rank: int) -> State:
        mesh = DeviceMesh("cpu", list(range(4)), _init_backend=False)
        local = torch.full((2, 3), float(rank))
        return {
            "rows": DTensor.from_local(local, mesh, [Shard(0)], run_check=False),
            "copies": DTensor.from_local(local, mesh, [Replicate()], run_check=False),
        }

    apart = 0.0
    for state in (on_parts, on_all):
        Group(tmp_path, ranks=4, on_conflict="error").save(state)
    apart = 1.0
    with pytest.raises(PlanError, match=r"1 tensors differ .*'e' \(ranks 0, 1 of the group\)"):
        Group(tmp_path, ranks=4, on_conflict="error").save(on_parts)
    _, plans = Group(tmp_path, ranks=4).save(on_parts)
    assert ["e" in names(plan) for plan in plans] == [True, False, True, False]


# ---- One name that is another thing on another rank ----------------------------------------------


def shard(rows: int, dtype: torch.dtype = torch.float32) -> DTensor:
    local = torch.ones(rows // 3, 3, dtype=dtype)
    return DTensor.from_local(
        local, mesh_of((3,)), [Shard(0)], run_check=False, shape=(rows, 3), stride=(3, 1)
    )


UNLIKE: dict[str, tuple[Any, Any, str]] = {
    "dtype": (lambda: torch.ones(4), lambda: torch.ones(4).half(), "torch.float16 of shape [4]"),
    "shape": (lambda: torch.ones(4), lambda: torch.ones(6), "torch.float32 of shape [6]"),
    "dimensions": (lambda: torch.ones(4), lambda: torch.ones(4, 1), "of shape [4, 1]"),
    "value first": (lambda: 3, lambda: torch.ones(4), "a Python value on rank 0"),
    "tensor first": (lambda: torch.ones(4), lambda: None, "a Python value on rank 2"),
    "shard's dtype": (lambda: shard(6), lambda: shard(6, torch.float64), "torch.float64 of shape"),
    "shard's tensor": (lambda: shard(6), lambda: shard(9), "of shape [9, 3]"),
    "shard and value": (lambda: shard(6), lambda: 3, "a Python value on rank 2"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_name_that_is_another_thing_on_a_rank_is_refused_with_both(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, text = UNLIKE[case]

    def state(rank: int) -> State:
        return {"same": torch.ones(2), "x": (other if rank == 2 else one)(), f"own{rank}": rank}

    planned: list[Callable[[Of], Any]] = [
        Group(tmp_path, 3).save,
        Group(tmp_path, 3, on_conflict="error").save,
        Group(tmp_path, 3, DefaultSavePlanner).save,
        lambda of: plan_all([DcpxSavePlanner() for _ in range(3)], of),  # under dcp.save
    ]
    for save in planned:
        with pytest.raises(PlanError, match=r"'x' is .* on rank 0 and .* on rank 2") as caught:
            save(state)
        assert text in str(caught.value) and caught.value.fqn == "x"
        assert "'same'" not in str(caught.value) and "'own" not in str(caught.value)
    assert not caplog.records


def test_ranks_may_have_names_that_others_lack_and_more_strides() -> None:
    def state(rank: int) -> State:
        tensor = torch.ones(3, 4) if rank else torch.ones(4, 3).t()
        return {"x": tensor, "grad": torch.ones(2, requires_grad=rank > 0), f"own{rank}": rank}

    _, metadata, _ = plan_all([DcpxSavePlanner() for _ in range(3)], state)
    assert len(metadata.state_dict_metadata) == 5


@pytest.mark.parametrize("planner", [DcpxSavePlanner, DefaultSavePlanner])
def test_values_that_differ_are_one_warning_with_any_planner(
    planner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"lr of {planner.__name__}"
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        Group(tmp_path, 3, planner).save(lambda rank: {name: 0.1 + (rank == 2), "step": 7})
    assert len(caplog.records) == 1
    assert f"'{name}' (ranks 0, 2 of the group)" in caplog.text and "step" not in caplog.text
