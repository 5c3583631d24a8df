"""`dcpx.load` by itself: what it loads, what it refuses before it reads, what it says of it."""

from __future__ import annotations

import dataclasses
import gc
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import WRITERS, data_files, save, save_rank_local
from support.states import assert_same, blank_like, mixed_state
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import torch_dcpx as dcpx

pytestmark = pytest.mark.usefixtures("no_leaks")


def stock_loaded(state: dict[str, Any], path: Path) -> dict[str, Any]:
    target = blank_like(state)
    dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return dict(target)


# ---- What is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize("writer", list(WRITERS))
def test_a_state_is_loaded_bit_for_bit_as_by_stock(tmp_path: Path, writer: str) -> None:
    state = mixed_state()
    save(state, tmp_path, writer)
    target = blank_like(state)
    tensor = target["bf16"]
    report = dcpx.load(target, tmp_path)
    assert_same(state, target)
    assert_same(stock_loaded(state, tmp_path), target)
    assert target["bf16"] is tensor, "in place"
    assert report.is_whole
    assert (report.missing, report.unexpected, report.casts) == ((), (), ())
    assert report.path == str(tmp_path)
    assert report.read is not None
    assert (report.items, report.nbytes) == (report.read.items, report.read.needed_bytes)
    assert report.nbytes > 0
    phases = (report.plan_s, report.read_s, report.apply_s, report.wait_s)
    assert min(phases) >= 0
    assert sum(phases) == pytest.approx(report.total_s)
    assert pickle.loads(pickle.dumps(report)) == report
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.items = 1  # type: ignore[misc]


@pytest.mark.parametrize("writer", list(WRITERS))
def test_a_load_where_tensors_are_made_on_another_device_fills_those_of_the_caller(
    tmp_path: Path, writer: str
) -> None:
    """A cast, and a target that no strides describe, go through a copy of the reader's own."""
    state = {"w": torch.arange(12.0).view(3, 4), "c": torch.arange(6.0).to(torch.cfloat)}
    save(state, tmp_path, writer)
    target = {"w": torch.zeros(3, 4, dtype=torch.float64), "c": torch.zeros(6, dtype=torch.cfloat)}
    target["c"] = target["c"].conj()
    with torch.device("meta"):
        dcpx.load(target, tmp_path, cast="allow")
    assert_same({"w": state["w"].double(), "c": state["c"]}, target)


def test_a_reader_of_the_callers_is_used_and_pointed_at_the_checkpoint(tmp_path: Path) -> None:
    state = {"w": torch.arange(5)}
    save(state, tmp_path / "a")
    reader = dcpx.DcpxReader(tmp_path / "b", options=dcpx.ReadOptions(verify="none"))
    for _ in range(2):
        target = blank_like(state)
        report = dcpx.load(target, tmp_path / "a", storage_reader=reader)
        assert_same(state, target)
        assert report.read is reader.last_report
    assert dcpx.load(blank_like(state), storage_reader=reader).is_whole


class Counter:
    """A `Stateful` object that notes its calls."""

    def __init__(self, value: int, calls: list[str], name: str) -> None:
        self.value, self._calls, self._name = value, calls, name

    def state_dict(self) -> dict[str, Any]:
        self._calls.append(f"{self._name}.state_dict")
        return {"value": self.value, "tensor": torch.full((3,), self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._calls.append(f"{self._name}.load_state_dict")
        assert torch.equal(state["tensor"], torch.full((3,), state["value"]))
        self.value = state["value"]


def test_stateful_objects_are_asked_and_told_in_the_order_of_stock(tmp_path: Path) -> None:
    def objects(value: int, calls: list[str]) -> dict[str, Any]:
        return {"b": Counter(value, calls, "b"), "plain": value, "a": Counter(-value, calls, "a")}

    dcp.save(objects(7, []), storage_writer=dcpx.DcpxWriter(tmp_path), no_dist=True)
    seen: dict[str, list[str]] = {"ours": [], "stock": []}
    ours, stock = objects(0, seen["ours"]), objects(0, seen["stock"])
    dcp.load(stock, storage_reader=dcpx.DcpxReader(tmp_path), no_dist=True)
    dcpx.load(ours, tmp_path)
    assert seen["ours"] == seen["stock"]
    for state in (ours, stock):
        assert (state["a"].value, state["b"].value, state["plain"]) == (-7, 7, 7)


def test_a_model_and_its_optimizer_resume_and_so_does_lazy_state(tmp_path: Path) -> None:
    def trained(steps: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = trained(2)
    dcp.save(saved, storage_writer=dcpx.DcpxWriter(tmp_path / "warm"), no_dist=True)
    target = trained(1)
    assert dcpx.load(target, tmp_path / "warm").is_whole
    assert_same(saved["model"].state_dict(), target["model"].state_dict())
    assert_same(saved["optimizer"].state_dict(), target["optimizer"].state_dict())

    lazy = [f"optimizer.state.{i}.{name}" for i in (0, 1) for name in ("exp_avg", "step")]
    cold = trained(0)
    assert not set(lazy) & set(dcpx.load(cold, tmp_path / "warm").unexpected)
    assert_same(saved["optimizer"].state_dict(), cold["optimizer"].state_dict())
    dcp.save(trained(0), storage_writer=dcpx.DcpxWriter(tmp_path / "cold"), no_dist=True)
    with pytest.raises(dcpx.MismatchError) as caught:
        dcpx.load(trained(1), tmp_path / "cold")
    assert set(lazy) <= set(caught.value.missing or ())
    report = dcpx.load(trained(1), tmp_path / "cold", allow_missing=["optimizer.state.*"])
    assert set(lazy) <= set(report.missing)


def test_what_no_state_asks_for_is_reported_and_no_error(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "old": {"a": 1, "b": torch.ones(3)}}, tmp_path)
    report = dcpx.load({"w": torch.zeros(2)}, tmp_path)
    assert sorted(report.unexpected) == ["old.a", "old.b"]
    assert report.is_whole
    assert sorted(dcpx.load({}, tmp_path).unexpected) == ["old.a", "old.b", "w"]


# ---- What is refused before it is read ----------------------------------------------------------


def test_all_mismatches_are_one_error_before_any_data_file_is_opened(tmp_path: Path) -> None:
    state = mixed_state()
    save(state, tmp_path)
    for name in data_files(tmp_path):
        (tmp_path / name).unlink()
    target = blank_like(state)
    target["_orig_mod.large"] = target.pop("large")
    target["weights"]["layer0"] = torch.zeros(3)
    target["bf16"] = target["bf16"].float()
    target["text"] = torch.zeros(1)
    target["one"] = 1
    before = pickle.dumps(target)
    with pytest.raises(dcpx.MismatchError) as caught:
        dcpx.load(target, tmp_path)
    error = caught.value
    assert error.missing == ("_orig_mod.large",)
    assert error.nearest == {"_orig_mod.large": ("large",)}
    assert error.shapes == (("weights.layer0", (64, 33), (3,)),)
    assert error.dtypes == (("bf16", "bfloat16", "float32"),)
    assert {name for name, _, _ in error.kinds or ()} == {"text", "one"}
    assert (error.ranks, error.path) == ((0,), str(tmp_path))
    assert isinstance(error, dcpx.PlanError)
    assert pickle.dumps(target) == before


@pytest.mark.parametrize("forgiven", [{"strict": False}, {"allow_missing": ["head.*", "lr"]}])
def test_forgiven_names_stay_as_they_are_and_shapes_are_not_forgiven(
    tmp_path: Path, forgiven: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    save({"w": torch.arange(4)}, tmp_path)
    head = torch.rand(3)
    target = {"w": torch.zeros(4, dtype=torch.int64), "head": {"w": head.clone()}, "lr": 0.5}
    with caplog.at_level(logging.WARNING, logger="torch_dcpx"):
        report = dcpx.load(target, tmp_path, **forgiven)
    assert_same({"w": torch.arange(4), "head": {"w": head}, "lr": 0.5}, target)
    assert sorted(report.missing) == ["head.w", "lr"]
    assert not report.is_whole
    with pytest.raises(dcpx.MismatchError) as caught:  # of a shape that differs
        dcpx.load({"w": torch.zeros(2, 2)}, tmp_path, cast="allow", **forgiven)
    assert caught.value.shapes == (("w", (4,), (2, 2)),)
    levels = {r.levelno for r in caplog.records if r.name == "torch_dcpx"}
    assert logging.WARNING in levels
    assert "head.w" in caplog.text


@pytest.mark.parametrize("writer", list(WRITERS))
def test_casts_are_refused_or_made_as_copy_makes_them_and_reported(
    tmp_path: Path, writer: str
) -> None:
    saved = {
        "a": torch.tensor([1.0, 1e30, float("nan"), -0.0, 1 / 3]),
        "b": torch.tensor([3, -7, 2**40]),
        "c": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    }
    save(saved, tmp_path, writer)

    def blank() -> dict[str, Any]:
        return {
            "a": torch.zeros(5, dtype=torch.bfloat16),
            "b": torch.zeros(3, dtype=torch.int32),
            "c": torch.zeros(2, dtype=torch.bfloat16),
        }

    for strict in (True, False):
        with pytest.raises(dcpx.MismatchError) as caught:
            dcpx.load(blank(), tmp_path, strict=strict)
        assert caught.value.dtypes == (("a", "float32", "bfloat16"), ("b", "int64", "int32"))
    target = blank()
    report = dcpx.load(target, tmp_path, cast="allow")
    assert report.casts == caught.value.dtypes
    assert not report.is_whole
    assert_same({name: blank()[name].copy_(saved[name]) for name in saved}, target)


def test_every_field_of_the_report_and_of_the_error_is_documented() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for field in dataclasses.fields(dcpx.LoadReport):
        assert f"\n        {field.name}: " in (dcpx.LoadReport.__doc__ or "")
    for name in dcpx.MismatchError.FIELDS:
        assert f"`{name}`" in (docs / "reference" / "errors.md").read_text()


# ---- Arguments --------------------------------------------------------------------------------


def test_other_readers_and_contradicting_arguments_are_refused_by_name(tmp_path: Path) -> None:
    save({"w": 1}, tmp_path)
    with pytest.raises(dcpx.UnsupportedError, match=r"dcp\.load"):
        dcpx.load({"w": 0}, storage_reader=dcp.FileSystemReader(tmp_path))
    with pytest.raises(dcpx.UnsupportedError, match="URL"):
        dcpx.load({"w": 0}, "gs://bucket/x")
    reader = dcpx.DcpxReader(tmp_path)
    other = dcpx.ReadOptions(workers=1)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("checkpoint_id", {}),
        ("options", {"storage_reader": reader, "options": other}),
        ("options", {"checkpoint_id": tmp_path, "options": dcpx.WriteOptions()}),
        ("strict", {"checkpoint_id": tmp_path, "strict": "model_only"}),
        ("allow_missing", {"checkpoint_id": tmp_path, "allow_missing": "w"}),
        ("cast", {"checkpoint_id": tmp_path, "cast": "widen"}),
    ]
    for option, arguments in bad:
        with pytest.raises(dcpx.OptionError) as caught:
            dcpx.load({"w": 0}, **arguments)
        assert caught.value.option == option
    assert dcpx.load({"w": 0}, storage_reader=reader, options=reader.options).is_whole


def test_metadata_of_this_rank_alone_is_loaded_where_there_is_no_other(tmp_path: Path) -> None:
    state = {"w": torch.arange(9), "step": 3}
    save_rank_local(state, tmp_path, 0)
    target = blank_like(state)
    assert dcpx.load(target, tmp_path).unexpected == ()
    assert_same(state, target)


def test_planning_many_entries_is_not_interrupted_by_collections(tmp_path: Path) -> None:
    class Watching(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            paused.append(gc.get_threshold() != thresholds)
            return super().create_local_plan()

    paused: list[bool] = []
    thresholds = gc.get_threshold()
    save({str(i): i for i in range(3000)}, tmp_path)
    with pytest.raises(dcpx.MismatchError):
        dcpx.load({"none": 0}, tmp_path)
    assert gc.get_threshold() == thresholds and gc.isenabled()
    dcpx.load({str(i): 0 for i in range(3000)}, tmp_path, planner=Watching())
    assert paused == [True]
    assert gc.get_threshold() == thresholds and gc.isenabled()
