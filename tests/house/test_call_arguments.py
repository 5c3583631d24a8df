"""Every argument of every public call: what it does not take is an error that names it."""

from __future__ import annotations

import inspect
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from argument_table import MODEL, NOT_SECONDS, STATE, TABLE
from support.ranks import run_cases
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxReader,
    DcpxWriter,
    OptionError,
    UnsupportedError,
)

NO_ARGUMENTS = {"close", "drain_on_sigterm", "CheckpointManager.latest", "CheckpointManager.tags"}
NO_ARGUMENTS |= {"CheckpointManager.close", "uninstall"}
# Classes of what torch-dcpx makes itself; rules, which a KeyMap checks; a box for any value.
NOT_CALLED = {"CopyGuard", "Finding", "Preemption", "PerRank", "SaveHandle", "Merge", "Split"}
NOT_CALLED |= {"Transpose", "ResumeInfo", "OpenCheckpoint", "LazyTensor", "Event"}
NOT_CALLED |= {"SaveEnded", "SaveFailed", "LoadEnded", "LoadFailed"}
NOT_CALLED |= {"Listing", "ListedCheckpoint", "Inspection"}


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory that holds one checkpoint, `good`."""
    root = tmp_path_factory.mktemp("arguments")
    dcpx.save({"w": torch.ones(2)}, root / "good", no_dist=True)
    return root


def files_beneath(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refusal(call: Any, given: dict[str, Any], argument: str, value: Any) -> Any:
    """Returns the error of a call with a wrong value."""
    given = {**given, argument: value}
    if argument.startswith("storage_"):
        del given["checkpoint_id"]
    values = (given.pop("rules"),) if argument == "rules" else ()
    with pytest.raises((OptionError, UnsupportedError)) as raised:
        call(*values, **given)
    return raised.value


@pytest.mark.parametrize(
    ("name", "argument"), [(name, one) for name, (_, _, wrong) in TABLE.items() for one in wrong]
)
def test_value_that_an_argument_does_not_take_is_named_before_anything_happens(
    name: str, argument: str, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(good)
    before = files_beneath(good)
    call, given, wrong = TABLE[name]
    for value in wrong[argument]:
        error = refusal(call, given, argument, value)
        text = str(error)
        assert "\n" not in text, value
        assert len(text) < 400, value
        if argument != "rules":  # an error shows the rule
            shown = {"tag_or_step": "tag", "tag_or_model": "tag"}.get(argument, argument)
            assert shown in text.partition("; ")[0] or shown == error.option, value
    assert files_beneath(good) == before
    assert [path.name for path in good.iterdir()] == ["good"]


def public_calls() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in set(dcpx.__all__) - {"__version__"}:
        value = getattr(dcpx, name)
        is_made_by_us = inspect.isclass(value) and (
            issubclass(value, BaseException) or name.endswith("Report") or name in NOT_CALLED
        )
        if not is_made_by_us:
            found[name] = value
    for name, method in inspect.getmembers(CheckpointManager, inspect.isfunction):
        if name[0] != "_":
            found[f"CheckpointManager.{name}"] = method
    return found


@pytest.mark.parametrize("name", sorted(public_calls()))
def test_table_has_every_argument_of_every_public_call(name: str) -> None:
    parameters = [
        one for one in inspect.signature(public_calls()[name]).parameters if one != "self"
    ]
    if name in NO_ARGUMENTS:
        assert not parameters
    else:
        assert sorted(TABLE[name][2]) == sorted(parameters)


def test_every_value_of_the_table_that_is_wrong_for_one_argument_is_right_for_another(
    tmp_path: Path,
) -> None:
    """So that no check is too strict: what these arguments take goes on working."""
    dcpx.save(types.MappingProxyType({"w": torch.ones(2)}), b"out", no_dist=True, options=None)
    assert dcpx.load({"w": torch.zeros(2)}, tmp_path / "out", planner=DefaultLoadPlanner()).is_whole
    dcpx.save(nn.ModuleDict({"m": MODEL}), "modules", planner=DefaultSavePlanner())
    dcpx.save({1: torch.ones(2)}, "./~")
    dcpx.save({"w": torch.ones(2)}, storage_writer=DcpxWriter("./~", overwrite=1))
    assert dcpx.load({"w": torch.zeros(2)}, storage_reader=DcpxReader("./~")).is_whole
    assert dcpx.load_pretrained(nn.ParameterDict({"w": torch.zeros(2)}), "./~").is_whole
    assert dcpx.verify("./~").ok
    assert (tmp_path / "~" / ".metadata").exists()
    manager = CheckpointManager(Path("root"), process_group=None)
    manager.save(1, model=MODEL).result()
    dcpx.wait()  # for the manager's callback
    dcpx.wait(0)
    assert manager.resume(model=MODEL, allow_missing={"x.*"}, cast="allow").tag == "step-1"


def test_arguments_of_what_calls_return_are_checked_too(tmp_path: Path) -> None:
    handle = dcpx.async_save(STATE, tmp_path / "ckpt")
    for value in NOT_SECONDS:
        with pytest.raises(OptionError, match="timeout must be None, or seconds"):
            handle.result(value)
    assert handle.result(None) is not None
    with CheckpointManager(tmp_path / "root").save_on_signal([signal.SIGUSR2]) as watch:
        for step in (None, "3", -1, 1.5, True):
            with pytest.raises(OptionError, match="step must be"):
                watch.requested(step)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="signals must be"):
            watch.watch("SIGTERM")  # type: ignore[arg-type]
        assert watch.requested(3) is False


@pytest.mark.parametrize("target", [types.MappingProxyType(STATE), nn.ModuleDict({"w": MODEL})])
def test_load_into_what_takes_no_values_is_refused_before_the_read(
    target: Any, tmp_path: Path
) -> None:
    dcpx.save(target, tmp_path / "ckpt")
    with pytest.raises(OptionError, match="state_dict must be"):
        dcpx.load(target, tmp_path / "ckpt")
    dcpx.save({"m": MODEL}, tmp_path / "module")
    assert dcpx.load(types.MappingProxyType({"m": MODEL}), tmp_path / "module").is_whole  # type: ignore[arg-type]


def test_swapped_arguments_are_said_to_be_swapped(tmp_path: Path) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: dcpx.save("ckpt", STATE),
        lambda: dcpx.async_save("ckpt", STATE),
        lambda: dcpx.load(Path("ckpt"), STATE),
        lambda: dcpx.export("out", MODEL),
        lambda: dcpx.load_pretrained("ckpt", MODEL),
    ]  # type: ignore[arg-type]
    for call in calls:
        with pytest.raises(OptionError, match="are swapped"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [dcpx.save, dcpx.async_save, dcpx.load, dcpx.prewarm])
def test_module_as_a_state_is_told_to_have_a_name(call: Any, tmp_path: Path) -> None:
    path: tuple[str, ...] = () if call is dcpx.prewarm else ("ckpt",)
    with pytest.raises(OptionError, match=r'got a Linear; give it a name, \{"model": model\}'):
        call(MODEL, *path)
    assert list(tmp_path.iterdir()) == []


def test_device_mesh_is_told_to_give_its_group(tmp_path: Path) -> None:
    class Mesh:
        def get_group(self) -> None: ...

    with pytest.raises(OptionError, match=r"give mesh\.get_group\(\)"):
        dcpx.save(STATE, tmp_path / "ckpt", process_group=Mesh())


def test_error_keeps_no_state_that_ranks_would_send_each_other() -> None:
    with pytest.raises(OptionError) as raised:
        dcpx.export(STATE, MODEL)  # type: ignore[arg-type]
    assert raised.value.value is None


def test_tilde_is_refused_with_the_path_that_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for path in ("~/ckpt", Path("~/ckpt"), b"~/ckpt"):
        with pytest.raises(OptionError) as raised:
            dcpx.save(STATE, path)
        assert f"'{tmp_path}/home/ckpt'" in str(raised.value)
        assert "'./~/ckpt'" in str(raised.value)
    with pytest.raises(OptionError, match="there is no such user here"):
        dcpx.save(STATE, "~nobody-here/ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multirank
def test_wrong_argument_of_one_rank_is_the_error_of_both(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("arguments_worker.py"), 2, "all", tmp_path)
