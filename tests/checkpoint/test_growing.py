"""What was saved beneath a `Stateful` comes back whole, whatever the fresh object holds."""

from __future__ import annotations

import copy
import enum
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from grown import Holder, all_through, is_same, tensor, through
from torch.distributed.checkpoint.metadata import Metadata

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, CorruptionError, MismatchError, PerRank, UnsupportedError
from torch_dcpx.checkpoint import containers, save_run
from torch_dcpx.checkpoint.growth import paths_of
from torch_dcpx.checkpoint.load import LoadRun
from torch_dcpx.checkpoint.stateful import Takes


class Color(enum.Enum):
    RED = 1


DOORS = ["stateful", "nested", "state", "absent"]
GROWN: dict[str, tuple[Any, Any]] = {  # saved, fresh
    "text keys": ({"a": 1, "b": {"c": tensor(1)}}, {}),
    "ints": ({1: 0.5, -2: tensor(2)}, {}),
    "texts of ints": ({"1": 0.5, "20": {"0": tensor(2)}}, {}),
    "bool float None": ({True: 1, 0.5: 2, None: 3}, {}),
    "bytes tuple dtype": ({b"a": 1, (1, "x"): {"y": 2}, torch.float32: tensor(3)}, {}),
    "one int more": ({1: 0.5, 2: tensor(4)}, {1: 0.0}),
    "deep": ({"a": {1: {2: [{3: tensor(5)}]}}}, {}),
    "Counter": ({"c": Counter({1: 2, "b": 3})}, {}),
    "present Counter": (Counter({1: 2, 2: 3}), Counter({1: 1})),
    "OrderedDict": ({"o": OrderedDict(b=1, a=2)}, {}),
    "defaultdict": ({"d": defaultdict(list, {1: [1]})}, {}),
    "empty ones": ({"a": {"b": {}, "c": [], "d": [{}], "e": [[{}], {}], "t": ()}, "z": 1}, {}),
    "an empty one": ({}, {}),
    "empty ones alone": ({None: {}, "a": {"b": [{}], 1: OrderedDict()}}, {}),
    "empty ones beneath what is there": ({"a": {"x": 1, "b": {}}, "l": [{}]}, {"a": {"x": 0}}),
    "empty ones in a list that is there": ([{"x": 1}, {}, [{}]], [{"x": 0}]),
    "empty ones in place of an empty dict": ({"l": [{}, {}]}, {"l": {}}),
    "empty ones before others": ({"e": {}, "b": {"d": {}, "c": 1}, "a": [{}], "z": tensor(2)}, {}),
    "list of dicts": ([{"a": 1.0}, {"a": 2.0}], []),
    "longer list": ([tensor(0), tensor(1), {"x": 1}], [tensor(9)]),
    "gaps": ([tensor(0), {}, {"a": {}}, tensor(2)], [tensor(9)]),
    "mixed list": (["a", {"x": 1}, tensor(1), [tensor(2), "q"]], []),
    "numbers, now tensors": ([tensor(1), tensor(2)], [1, 2]),
    "None, now a list": ({"l": [{"a": 1}, tensor(2)]}, {"l": None}),
    "list, now a dict": ({"l": {"a": 1}}, {"l": []}),
    "dict, now a list": ({"l": [{"a": 1}]}, {"l": {}}),
    "dict, now a tensor": ({"l": tensor(1, 4)}, {"l": {}}),
    "nothing, a number, a tuple, a list, now tensors": (
        {
            "best": tensor(1),
            "loss": torch.tensor(2),
            "l": [tensor(3, 1)],
            1: tensor(4),
            "e": tensor(5),
        },
        {"best": None, "loss": 0.5, "l": [None], 1: (1, 2), "e": []},
    ),
    "tensors, now values": (
        {"best": None, "loss": 0.5, "l": [1, {"a": 2}]},
        {
            "best": tensor(1),
            "loss": torch.tensor(2),
            "l": [tensor(3), {"a": tensor(4)}],
        },
    ),
    "layouts": (
        {
            "a": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "b": [torch.rand(3, 4).t(), {"c": torch.rand(2, 3, 4).permute(2, 0, 1)}],
        },
        {},
    ),
    "gradients": (
        {1: tensor(1.0).requires_grad_(), "p": torch.nn.Parameter(torch.rand(4, 3).t())},
        {},
    ),
    "frozen": ({"p": torch.nn.Parameter(tensor(1), requires_grad=False)}, {}),
    "tensors": ({"a": torch.tensor(3), "b": torch.ones(3, dtype=torch.bfloat16)}, {}),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_only_the_checkpoint_holds_comes_back(tmp_path: Path, door: str) -> None:
    given = copy.deepcopy(GROWN)
    fresh = {name: pair[1] for name, pair in given.items()}
    saved = {name: pair[0] for name, pair in given.items()}
    loaded = all_through(door, tmp_path / "p", saved, dict(fresh))
    wrong = {
        name: loaded[name] for name, pair in GROWN.items() if not is_same(loaded[name], pair[0])
    }
    assert not wrong
    if door != "absent":  # others may hold them
        moved = [n for n, own in fresh.items() if isinstance(own, dict) and loaded[n] is not own]
        assert not moved
    dcpx.save({"k": loaded}, tmp_path / "again", no_dist=True)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "enum": ({Color.RED: 1}, {}, "its key was an object that no load makes anew"),
    "factory": ({"d": defaultdict(lambda: 0, {"a": 1})}, {}, "it lies in a defaultdict of "),
    "another kind": ({"a": {"b": 1}}, {"a": tensor(1)}, "it was a dict or list, and is a Tensor"),
    "a dict with values": ({"a": [{"b": 1}]}, {"a": {"x": 1}}, "and is a dict here"),
    "one value": ({"a": 5}, {"a": {"x": 1}}, "it was one value, and is a dict or list"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("door", DOORS[:3])
def test_what_cannot_be_made_is_refused_and_nothing_changes(
    tmp_path: Path, door: str, name: str
) -> None:
    saved, fresh, why = REFUSED[name]
    present = copy.deepcopy(fresh)
    with pytest.raises(MismatchError, match=r"strict=False leaves them out") as raised:
        through(door, tmp_path / "p", saved, present)
    assert why in str(raised.value)
    assert is_same(present, fresh)


def test_without_strict_what_has_no_place_is_left_out(tmp_path: Path) -> None:
    assert through("state", tmp_path / "p", {1: 2, Color.RED: 1}, {}, strict=False) == {}


def test_shards_are_no_plain_tensor(tmp_path: Path) -> None:
    planner = dcpx.DcpxSavePlanner()
    whole = torch.arange(8.0)
    dcpx.save({"k": {"a": whole, "b": 1}}, tmp_path, no_dist=True, planner=planner)
    metadata = dcpx.DcpxReader(tmp_path).read_metadata()
    entry: Any = metadata.state_dict_metadata["k.a"]
    entry.chunks.append(entry.chunks[0])

    class Reader(dcpx.DcpxReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return metadata

    with pytest.raises(MismatchError, match=r"'k\.a' \(a tensor that was saved in 2 pieces"):
        dcpx.load({"k": Holder({"b": 0})}, storage_reader=Reader(tmp_path), no_dist=True)


def test_failed_read_takes_new_entries_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"l": [{"a": 1}], "d": {1: 2}, "n": {"x": 1}, "t": tensor(1)}
    dcpx.save({"k": Holder(saved)}, tmp_path, no_dist=True)
    fresh: dict[str, Any] = {"l": [], "d": {}, "n": None, "t": None}

    def fails(_: LoadRun) -> None:
        assert len(fresh["l"]) == len(fresh["d"]) == 1 and fresh["t"] is not None
        raise CorruptionError("damaged")

    monkeypatch.setattr(LoadRun, "read", fails)
    with pytest.raises(CorruptionError, match="damaged"):
        dcpx.load({"k": Holder(fresh)}, tmp_path, no_dist=True)
    assert fresh == {"l": [], "d": {}, "n": None, "t": None}


@pytest.mark.parametrize(
    ("saved", "fresh", "wanted", "is_told"),
    [
        ({7: 1, 10: 2}, {}, {7: 1, 10: 2}, True),
        ({7: 1, 10: 2}, {7: 0}, {7: 1, 10: 2}, False),
        ({"7": 1, "10": 2}, {"7": 0}, {"7": 1, "10": 2}, False),
        ({7: 1, "x": 2}, {}, {"7": 1, "x": 2}, False),
        ({"07": 1}, {}, {"07": 1}, False),
    ],
)
@pytest.mark.parametrize("door", ["stateful", "nested"])
def test_keys_of_saves_without_a_record_are_as_those_that_are_there_or_numbers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    door: str,
    saved: dict[Any, Any],
    fresh: dict[Any, Any],
    wanted: dict[Any, Any],
    is_told: bool,
) -> None:
    monkeypatch.setattr(save_run, "add_record", lambda *_: None)
    assert is_same(through(door, tmp_path / "p", saved, dict(fresh)), wanted)
    assert ("were numbers or texts" in caplog.text) is is_told


def test_new_entries_come_in_the_order_of_the_state_not_of_the_ranks() -> None:
    names = {"k.c": ("k", "c"), "k.a": ("k", "a"), "k.b": ("k", "b")}
    metadata = Metadata({}, names)
    assert list(paths_of(sorted(names), metadata, {"k": Takes.ALL})) == list(names)


@pytest.mark.parametrize("is_stocks", [True, False])
def test_fresh_optimizer_takes_the_saved_state(tmp_path: Path, is_stocks: bool) -> None:
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    if is_stocks:  # no record says what the keys were
        dcp.save({"o": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    else:
        dcpx.save({"o": optimizer}, tmp_path, no_dist=True)
    again = torch.optim.AdamW(net.parameters())
    dcpx.load({"o": again}, tmp_path, no_dist=True)
    assert is_same(again.state_dict()["state"], optimizer.state_dict()["state"])


def test_values_of_each_rank_come_back_where_the_state_has_none(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
        manager.save(1, state={"a": 1, "r": PerRank({1: 2})})
        state: dict[str, Any] = {"a": 0}
        manager.resume(state=state)
        assert state["a"] == 1 and state["r"].value == {1: 2}
        manager.save(2, state=state)
        left: dict[str, Any] = {"a": 0}
        manager.resume(state=left, strict=False)
        assert left == {"a": 1}
        with pytest.raises(MismatchError, match=r"state\.r"):  # it is no plain value
            manager.resume(state={"a": 0, "r": None})


@pytest.mark.parametrize("value", [{"x": PerRank(1)}, [1, PerRank(2)], {"a": [{"b": PerRank(1)}]}])
def test_value_of_each_rank_within_another_is_refused_at_the_save(
    tmp_path: Path, value: Any
) -> None:
    with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
        with pytest.raises(
            UnsupportedError, match=r"state\.r.*PerRank is a value of state= itself"
        ):
            manager.save(1, state={"r": value})
        assert manager.latest() is None
    copied = copy.deepcopy(PerRank([1]))
    assert copied.value == [1]


def test_plain_value_takes_no_place_of_a_ranks_own(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
        manager.save(1, state={"a": 1, "r": 5})
        state: dict[str, Any] = {"a": 0, "r": PerRank(None)}
        with pytest.raises(MismatchError, match=r"state\.r was not saved there"):
            manager.resume(state=state)
        manager.resume(state=state, allow_missing=["state.r"])
    assert state["a"] == 1 and state["r"].value is None


@pytest.mark.parametrize("call", [dcpx.save, dcpx.async_save])
def test_plans_that_are_kept_have_the_record_of_each_state(tmp_path: Path, call: Any) -> None:
    for number, keys in enumerate(([1, 2], [1, 2], [1, 3], ["1", "3"], [1, 2])):
        saved = {key: float(number) for key in keys}
        done = call({"k": Holder({"v": saved})}, tmp_path / str(number), no_dist=True)
        if call is dcpx.async_save:
            done.result()
        holder = Holder({"v": {}})
        dcpx.load({"k": holder}, tmp_path / str(number), no_dist=True)
        assert is_same(holder.state["v"], saved)


def test_plain_dicts_take_nothing_new(tmp_path: Path) -> None:
    dcpx.save({"k": {"a": {1: 2}, "b": 3}}, tmp_path, no_dist=True)
    state: dict[str, Any] = {"k": {"a": {}, "b": 0}}
    report = dcpx.load(state, tmp_path, no_dist=True)
    assert state == {"k": {"a": {}, "b": 3}} and "k.a.1" in report.unexpected


def test_smaller_module_takes_no_parameters(tmp_path: Path) -> None:
    dcpx.save({"m": torch.nn.Linear(2, 2)}, tmp_path, no_dist=True)
    report = dcpx.load({"m": torch.nn.Linear(2, 2, bias=False)}, tmp_path, no_dist=True)
    assert report.unexpected == ("m.bias",)


@pytest.mark.parametrize(
    "record",
    [
        {"containers": [1]},
        {"containers": {5: ("", [])}},
        {"containers": {("k", 1.5): ("", [])}},
        {"containers": {("k",): ("", [])}, "nameless": 1},
        {"containers": {("k",): ("", [])}, "orders": {("k",): 1}},
    ],
)
@pytest.mark.parametrize("begin", [containers.RECORD, containers.EMPTY])
def test_record_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str, record: Any
) -> None:
    def add(planner: Any, *_: Any) -> None:
        planner.state_dict[f"{begin}0"], planner.mappings[f"{begin}0"] = record, (f"{begin}0",)

    monkeypatch.setattr(save_run, "add_record", add)
    with pytest.raises(CorruptionError, match=rf"read the item '{begin}0' .*no record"):
        through("stateful", tmp_path / "p", {7: 1}, {})


def test_record_of_before_tells_of_empty_ones_in_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "EMPTY", containers.RECORD)
    monkeypatch.setattr(
        containers.Record, "_asdict", lambda record: {"containers": record.containers}
    )
    saved = {"a": {"b": {}, "c": 1}, "d": {}}
    assert through("stateful", tmp_path / "p", saved, {}) == {"a": {"b": {}, "c": 1}}


def test_states_of_text_keys_have_no_record(tmp_path: Path) -> None:
    dcpx.save({"k": Holder({"a": {"b": 1}, "l": [{"c": tensor(1)}]})}, tmp_path, no_dist=True)
    names = dcpx.DcpxReader(tmp_path).read_metadata().state_dict_metadata
    assert set(names) == {"k.a.b", "k.l.0.c"}


def test_module_of_fewer_names_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    saved = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    now, held = torch.nn.Sequential(torch.nn.Linear(2, 2)), tensor(0)
    with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
        manager.save(1, state={"ema": saved, "t": tensor(1)})
        given = {"ema": now, "t": held}
        with pytest.raises(
            MismatchError, match=r"no place for 2 names .*'state\.ema\.1\."
        ) as caught:
            manager.resume(state=given)
        assert set(caught.value.left) == {"state.ema.1.weight", "state.ema.1.bias"}
        assert not held.any()
        for arguments in ({"allow_missing": ["state.ema.1.*"]}, {"strict": False}):
            now = torch.nn.Sequential(torch.nn.Linear(2, 2))
            manager.resume(state={"ema": now}, **arguments)
            assert torch.equal(now[0].weight, saved[0].weight)
