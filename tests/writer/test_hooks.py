"""Planners that override hooks: same calls, same arguments, same result as with stock's storage."""

from __future__ import annotations

import functools
import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import hook_planners as hp
from support.saves import READERS, WRITERS, files_in
from support.states import assert_same, blank_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem

from torch_dcpx import DcpxReader, DcpxWriter, ReadOptions, WriteOptions

SAVE_HOOKS = ("resolve_data", "lookup_object", "transform_object")
LOAD_HOOKS = (
    "resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor", "load_bytes",
)  # fmt: skip
MIB = 1 << 20


def sample(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "name": "adamw",
        "weight": torch.randn(16, 16, generator=g),
        "bias": torch.randn(7, generator=g),
        "ids": torch.arange(30).view(5, 6),
        "scalar": torch.tensor(2.5 + seed),
        "step": 3 + seed,
        "transposed": torch.randn(4, 9, generator=g).t(),
    }


def stored(directory: Path) -> dict[Any, Any]:
    """Returns what each item of a checkpoint holds, read by torch.load alone."""
    metadata = dcp.FileSystemReader(directory).read_metadata()
    found = {}
    for index, info in metadata.storage_data.items():
        data = (directory / info.relative_path).read_bytes()[info.offset :][: info.length]
        value = torch.load(io.BytesIO(data), weights_only=False)
        found[index.fqn, tuple(index.offset or ())] = value
    return dict(sorted(found.items()))


def recorded(cls: type, hooks: tuple[str, ...]) -> Any:
    """Returns a planner of `cls` that records those hooks that it overrides, on the instance."""
    base = DefaultSavePlanner if hooks is SAVE_HOOKS else DefaultLoadPlanner
    own = tuple(n for n in hooks if getattr(cls, n, None) not in (None, getattr(base, n)))
    return type(cls.__name__, (hp.Recorded, cls), {"hooks": own})()


# ---- Saves --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planner", [hp.Looks, hp.Halves, hp.Strides, hp.Resolves, hp.OneBuffer, hp.ForeignSave]
)
def test_save_hooks_are_called_and_stored_as_by_stock(tmp_path: Path, planner: type) -> None:
    calls, items = {}, {}
    for name, writer in WRITERS.items():
        used = recorded(planner, SAVE_HOOKS)
        dcp.save(sample(), storage_writer=writer(tmp_path / name), planner=used, no_dist=True)
        calls[name], items[name] = used.calls, stored(tmp_path / name)
    assert calls["ours"] == calls["stock"]
    assert len(calls["ours"]) >= len(sample())
    assert_same(items["stock"], items["ours"])
    for key, value in items["stock"].items():
        if isinstance(value, torch.Tensor):
            assert items["ours"][key].requires_grad == value.requires_grad, key


class TakesAnyDtype(DefaultLoadPlanner):
    """By a hook of its own, which is all that says so."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)


@pytest.mark.parametrize("planner", [hp.Looks, hp.Halves, hp.Strides, hp.Resolves])
def test_state_saved_through_hooks_loads_as_from_stock(tmp_path: Path, planner: type) -> None:
    targets = []
    for name, writer in WRITERS.items():
        dcp.save(sample(), storage_writer=writer(tmp_path / name), planner=planner(), no_dist=True)
        for reader in READERS.values():
            target = blank_like(sample())
            own = TakesAnyDtype() if planner is hp.Halves else None
            dcp.load(target, storage_reader=reader(tmp_path / name), planner=own, no_dist=True)
            targets.append(target)
    for target in targets[1:]:
        assert_same(targets[0], target)


def test_a_file_per_item_is_asked_for_and_numbered_in_the_plans_order(tmp_path: Path) -> None:
    calls, names = {}, {}
    for name, writer in WRITERS.items():
        used = recorded(hp.Looks, SAVE_HOOKS)
        made = writer(tmp_path / name, single_file_per_rank=False)
        dcp.save(sample(), storage_writer=made, planner=used, no_dist=True)
        metadata = dcp.FileSystemReader(tmp_path / name).read_metadata()
        calls[name] = used.calls
        names[name] = {index: info.relative_path for index, info in metadata.storage_data.items()}
    assert calls["ours"] == calls["stock"]
    assert names["ours"] == names["stock"]


def test_hooks_set_on_the_instance_are_used_in_save_and_load(tmp_path: Path) -> None:
    save_planner, load_planner = DefaultSavePlanner(), DefaultLoadPlanner()
    stock_transform = save_planner.transform_object
    save_planner.transform_object = lambda item, value: (  # type: ignore[method-assign]
        value.clone().neg_() if isinstance(value, torch.Tensor) else stock_transform(item, value)
    )
    kept = []

    def resolve(item: Any) -> torch.Tensor:
        kept.append((item, DefaultLoadPlanner.resolve_tensor(load_planner, item)))
        return torch.empty_like(kept[-1][1])

    def commit(item: Any, tensor: torch.Tensor) -> None:
        assert kept[-1][0] is item
        kept[-1][1].copy_(tensor).neg_()

    load_planner.resolve_tensor = resolve  # type: ignore[method-assign]
    load_planner.commit_tensor = commit  # type: ignore[method-assign]
    dcp.save(sample(), storage_writer=DcpxWriter(tmp_path), planner=save_planner, no_dist=True)
    target = blank_like(sample())
    dcp.load(target, storage_reader=DcpxReader(tmp_path), planner=load_planner, no_dist=True)
    assert_same(sample(), target)


@pytest.mark.parametrize(
    ("state", "made", "text"),
    [
        ({"a": 1}, torch.ones(3), "Data must be io.BytesIO for BYTE_IO write items"),
        ({"a": 1}, "text", "Data must be io.BytesIO for BYTE_IO write items"),
        ({"a": torch.ones(3)}, "text", "Data must be torch.Tensor for non-BYTE_IO write items"),
    ],
)
def test_wrong_kind_of_data_is_refused_with_stocks_texts(
    tmp_path: Path, state: dict[str, Any], made: Any, text: str
) -> None:
    for name, writer in WRITERS.items():
        planner = DefaultSavePlanner()
        planner.resolve_data = lambda _: made  # type: ignore[method-assign]
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state, storage_writer=writer(tmp_path / name), planner=planner, no_dist=True)
        error = caught.value.failures[0][0]
        if name == "stock" and isinstance(state["a"], torch.Tensor):
            assert type(error) is AttributeError  # it calls `detach` before it looks
        else:
            assert type(error) is AssertionError
            assert str(error) == text or (name == "stock" and not str(error))  # before torch 2.10


# ---- Loads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planner",
    [
        hp.Commits, hp.Copies, hp.Scratch, hp.Expects, hp.LooksElsewhere, hp.Transforms,
        hp.LoadsBytes, hp.ForeignLoad,
    ],
)  # fmt: skip
def test_load_hooks_are_called_with_what_stock_gives_them(tmp_path: Path, planner: type) -> None:
    for by, writer in WRITERS.items():
        # Two files, their items mixed in the plan.
        made = writer(tmp_path / by, single_file_per_rank=False)
        dcp.save(sample(), storage_writer=made, no_dist=True)
        calls, targets = {}, {}
        for name, reader in READERS.items():
            used = recorded(planner, LOAD_HOOKS)
            target = blank_like(sample())
            target["weight"] = target["weight"].double()  # converted
            target["ids"] = torch.zeros(6, 5, dtype=torch.int64).t()
            dcp.load(target, storage_reader=reader(tmp_path / by), planner=used, no_dist=True)
            calls[name] = used.calls
            targets[name] = [target, getattr(used, "elsewhere", None)]
        assert calls["ours"] == calls["stock"]
        assert calls["ours"]
        assert_same(targets["stock"], targets["ours"])


class Names(DefaultLoadPlanner):
    """Writes down the order of what is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.taken.append(read_item.dest_index.fqn)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.taken.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


@pytest.mark.parametrize("kwargs", [{"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_items_are_taken_file_by_file_as_stock_takes_them(
    tmp_path: Path, kwargs: dict[str, Any]
) -> None:
    dcp.save(sample(), storage_writer=dcp.FileSystemWriter(tmp_path, **kwargs), no_dist=True)
    taken = []
    for reader in READERS.values():
        planner = Names()
        dcp.load(blank_like(sample()), storage_reader=reader(tmp_path), planner=planner,
                 no_dist=True)  # fmt: skip
        taken.append(planner.taken)
    assert taken[0] == taken[1]
    assert sorted(taken[0]) == sorted(sample())


# ---- Memory -------------------------------------------------------------------------------------


class Alive:
    """Counts the bytes of what it made and nobody has dropped, and their peak."""

    def __init__(self) -> None:
        self.nbytes = self.peak_bytes = self.made = 0

    def tensor(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        memory = np.zeros(like.numel() * dtype.itemsize, dtype=np.uint8)
        self._count(memory, memory.nbytes)  # the tensor's storage keeps the array alive
        return torch.from_numpy(memory).view(dtype).view(like.shape)

    def bytes_io(self, data: bytes) -> io.BytesIO:
        stream = io.BytesIO(data)
        self._count(stream, len(data))
        return stream

    def _count(self, owner: Any, nbytes: int) -> None:
        self.made += 1
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        weakref.finalize(owner, self._drop, nbytes)

    def _drop(self, nbytes: int) -> None:
        self.nbytes -= nbytes


class MakesTensors(DefaultSavePlanner):
    """Every tensor is a temporary of `dtype`, every value 3 MiB of bytes."""

    def __init__(self, alive: Alive, dtype: torch.dtype) -> None:
        super().__init__()
        self.alive, self.dtype = alive, dtype

    def transform_object(self, write_item: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.alive.tensor(value, self.dtype).copy_(value)
        return self.alive.bytes_io(hp.saved(torch.zeros(3 * MIB, dtype=torch.uint8)))


TENSORS = {f"t{i}": torch.full((MIB,), float(i)) for i in range(12)}  # 4 MiB each
BOUNDED = WriteOptions(workers=2, slot_bytes=MIB, host_memory_bytes=20 * MIB, durability="none")


def bounded_writer(directory: Path) -> DcpxWriter:
    return DcpxWriter(directory, per_thread_copy_ahead=1 << 30, options=BOUNDED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_temporaries_of_a_save_stay_within_one_window(tmp_path: Path, dtype: str) -> None:
    alive = Alive()
    planner = MakesTensors(alive, getattr(torch, dtype))
    dcp.save(TENSORS, storage_writer=bounded_writer(tmp_path), planner=planner,
             no_dist=True)  # fmt: skip
    assert alive.made == len(TENSORS)
    assert alive.nbytes == 0
    assert 8 * MIB < alive.peak_bytes <= 20 * MIB


def test_temporaries_of_a_hook_set_on_the_instance_stay_within_one_window(tmp_path: Path) -> None:
    alive, planner = Alive(), DefaultSavePlanner()
    planner.transform_object = lambda _, value: (  # type: ignore[method-assign]
        alive.tensor(value, value.dtype).copy_(value)
    )
    dcp.save(TENSORS, storage_writer=bounded_writer(tmp_path), planner=planner, no_dist=True)
    assert 8 * MIB < alive.peak_bytes <= 20 * MIB


def test_byte_items_of_a_save_stay_within_one_window_and_one_item(tmp_path: Path) -> None:
    alive = Alive()
    dcp.save(
        dict.fromkeys(map(str, range(12)), 0),
        storage_writer=bounded_writer(tmp_path),
        planner=MakesTensors(alive, torch.float32),
        no_dist=True,
    )
    assert (alive.made, alive.nbytes) == (12, 0)
    assert alive.peak_bytes <= 20 * MIB + 4 * MIB  # what the next one takes is known too late


def test_item_larger_than_the_window_is_alive_alone(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((6 * MIB,), float(i)) for i in range(2)}  # 24 MiB each
    alive = Alive()
    dcp.save(state, storage_writer=bounded_writer(tmp_path),
             planner=MakesTensors(alive, torch.float32), no_dist=True)  # fmt: skip
    assert alive.peak_bytes == 24 * MIB
    for reader in READERS.values():
        target = blank_like(state)
        dcp.load(target, storage_reader=reader(tmp_path), no_dist=True)
        assert_same(state, target)


class MakesTargets(DefaultLoadPlanner):
    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self.alive = alive

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.alive.tensor(super().resolve_tensor(read_item), torch.float32)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)


@pytest.mark.parametrize("options", [ReadOptions(), ReadOptions(workers=1, slot_bytes=MIB)])
def test_targets_that_a_planner_makes_are_alive_one_at_a_time(
    tmp_path: Path, options: ReadOptions
) -> None:
    dcp.save(TENSORS, storage_writer=bounded_writer(tmp_path), no_dist=True)
    alive = Alive()
    target = blank_like(TENSORS)
    dcp.load(target, storage_reader=DcpxReader(tmp_path, options=options),
             planner=MakesTargets(alive), no_dist=True)  # fmt: skip
    assert_same(TENSORS, target)
    assert (alive.made, alive.nbytes) == (len(TENSORS), 0)
    assert alive.peak_bytes == 4 * MIB


# ---- Failing hooks ------------------------------------------------------------------------------


class PlannedError(Exception):
    """Raised by a hook under test."""


def failing(planner: Any, hook: str, after: int) -> Any:
    """Makes `hook` of the planner raise in its call number `after`."""
    inner, calls = getattr(planner, hook), iter(range(1000))

    @functools.wraps(inner)  # dcp.save looks at the parameters
    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == after:
            raise PlannedError(hook)
        return inner(*args, **kwargs)

    setattr(planner, hook, call)
    return planner


@pytest.mark.usefixtures("no_leaks")
def test_failing_save_hook_leaves_nothing_and_the_next_save_works(tmp_path: Path) -> None:
    plans = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
    writer = bounded_writer(tmp_path)
    dcp.save(sample(), storage_writer=writer, no_dist=True)
    for number, (hook, after) in enumerate(
        [(name, 0) for name in plans] + [(name, after) for name in SAVE_HOOKS for after in (0, 6)]
    ):
        before = files_in(tmp_path)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(sample(), storage_writer=writer, no_dist=True,
                     planner=failing(DefaultSavePlanner(), hook, after))  # fmt: skip
        assert {r: type(e[0]) for r, e in caught.value.failures.items()} == {0: PlannedError}
        assert files_in(tmp_path) == before
        dcp.save(sample(number), storage_writer=writer, no_dist=True)
        target = blank_like(sample())
        dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
        assert_same(sample(number), target)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("writer", WRITERS)
def test_failing_load_hook_raises_and_the_next_load_works(tmp_path: Path, writer: str) -> None:
    plans = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
    dcp.save(sample(), storage_writer=WRITERS[writer](tmp_path), no_dist=True)
    reader = DcpxReader(tmp_path)
    cases = [(name, 0) for name in plans] + [(name, at) for name in LOAD_HOOKS for at in (0, 1)]
    for hook, after in cases:
        with pytest.raises(CheckpointException) as caught:
            dcp.load(blank_like(sample()), storage_reader=reader, no_dist=True,
                     planner=failing(DefaultLoadPlanner(), hook, after))  # fmt: skip
        assert {r: type(e[0]) for r, e in caught.value.failures.items()} == {0: PlannedError}
        target = blank_like(sample())
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert_same(sample(), target)
