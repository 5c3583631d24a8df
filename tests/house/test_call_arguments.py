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
import torch.distributed as dist
from argument_table import BY_NAME, MODEL, NOT_READ, NOT_SECONDS, NOT_SWITCHES, OWN, STATE
from support.rank_fixture import StartRanks
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxReader,
    DcpxWriter,
    KeyMap,
    OptionError,
    ReadOptions,
    UnsupportedError,
    WriteOptions,
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


def wrong_values(name: str) -> dict[str, Any]:
    """Returns what each argument of a call does not take."""
    call, _, own = OWN[name]
    found = {}
    for argument, parameter in inspect.signature(call).parameters.items():
        is_switch = str(parameter.annotation) in ("bool", "bool | None")
        usual = NOT_READ if argument == "options" else NOT_SWITCHES if is_switch else None
        if is_switch and parameter.annotation == "bool | None":
            usual = NOT_SWITCHES[1:]
        found[argument] = own.get(argument, BY_NAME.get(argument, usual))
    assert None not in found.values(), (name, found)
    assert own.keys() <= found.keys(), name
    return found


@pytest.mark.parametrize("name", OWN)
def test_value_that_an_argument_does_not_take_is_named_before_anything_happens(
    name: str, tmp_path: Path
) -> None:
    dcpx.save({"w": torch.ones(2)}, tmp_path / "good", no_dist=True)
    before = files_beneath(tmp_path)
    call, given, _ = OWN[name]
    for argument, values in wrong_values(name).items():
        for value in values:
            error = refusal(call, given, argument, value)
            text = str(error)
            assert "\n" not in text, (argument, value)
            assert len(text) < 400, (argument, value)
            if argument != "rules":  # an error shows the rule
                shown = {"tag_or_step": "tag", "tag_or_model": "tag"}.get(argument, argument)
                is_named = shown in text.partition("; ")[0] or shown == error.option
                assert is_named, (argument, value, text)
    assert files_beneath(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


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


def test_table_has_every_public_call() -> None:
    more = {"DcpxStager.prewarm", "KeyMap.dry_run"}
    assert public_calls().keys() - NO_ARGUMENTS == OWN.keys() - more
    for name in NO_ARGUMENTS:
        assert set(inspect.signature(public_calls()[name]).parameters) <= {"self"}


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
        with pytest.raises(OptionError, match="timeout"):
            handle.result(value)
    assert handle.result(None) is not None
    with CheckpointManager(tmp_path / "root").save_on_signal([signal.SIGUSR2]) as watch:
        for step in (None, "3", -1, 1.5, True):
            with pytest.raises(OptionError, match="step"):
                watch.requested(step)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="signals"):
            watch.watch("SIGTERM")  # type: ignore[arg-type]
        assert watch.requested(3) is False


@pytest.mark.parametrize("target", [types.MappingProxyType(STATE), nn.ModuleDict({"w": MODEL})])
def test_load_into_what_takes_no_values_is_refused_before_the_read(
    target: Any, tmp_path: Path
) -> None:
    dcpx.save(target, tmp_path / "ckpt")
    with pytest.raises(OptionError, match="state_dict"):
        dcpx.load(target, tmp_path / "ckpt")
    dcpx.save({"m": MODEL}, tmp_path / "module")
    assert dcpx.load(types.MappingProxyType({"m": MODEL}), tmp_path / "module").is_whole  # type: ignore[arg-type]


def test_what_was_meant_is_said(tmp_path: Path) -> None:
    class Mesh:
        def get_group(self) -> None: ...

    swapped: list[Callable[[], Any]] = [
        lambda: dcpx.save("ckpt", STATE),
        lambda: dcpx.async_save("ckpt", STATE),
        lambda: dcpx.load(Path("ckpt"), STATE),
        lambda: dcpx.export("out", MODEL),
        lambda: dcpx.load_pretrained("ckpt", MODEL),
    ]  # type: ignore[arg-type]
    for call in swapped:
        with pytest.raises(OptionError, match="swapped"):
            call()
    for call in (dcpx.save, dcpx.async_save, dcpx.load, dcpx.prewarm):
        with pytest.raises(OptionError, match=r'\{"model": model\}'):
            call(MODEL, *(() if call is dcpx.prewarm else ("ckpt",)))  # type: ignore[operator]
    with pytest.raises(OptionError, match=r"mesh\.get_group\(\)"):
        dcpx.save(STATE, "ckpt", process_group=Mesh())
    with pytest.raises(OptionError) as raised:
        dcpx.export(STATE, MODEL)  # type: ignore[arg-type]
    assert raised.value.value is None, "no state that ranks would send each other"
    assert list(tmp_path.iterdir()) == []


# ---- Two ranks: a wrong argument of one is the error of both, at once ---------------------------

# Both ranks wait as long for each other, should the error not arrive.
WRITE, READ = WriteOptions(save_timeout_s=900), ReadOptions(load_timeout_s=900)
GROUP = {"process_group": "gloo"}, {"no_dist": "yes"}


def fails_on_both(call: Callable[..., Any], given: dict[str, Any], *wrongs: dict[str, Any]) -> None:
    """Rank 1 gives what is wrong. Both raise an OptionError that names it."""
    for wrong in wrongs:
        with pytest.raises(OptionError) as raised:
            call(**{**given, **(wrong if dist.get_rank() == 1 else {})})
        (name,) = wrong
        assert name in str(raised.value), raised.value


def calls_fail_on_both(root: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(4.0)}
    endless: dict[str, Any] = {}
    endless["x"] = endless
    states = {"state_dict": [1]}, {"state_dict": endless}, {"checkpoint_id": 3}
    dcpx.save(state, root / "good", options=WRITE)
    save = {"state_dict": state, "checkpoint_id": root / "out", "options": WRITE}
    wrongs = [{"planner": DefaultLoadPlanner()}, {"options": READ}, {"storage_writer": 3}]
    for call in (dcpx.save, dcpx.async_save):
        fails_on_both(call, save, *states, *wrongs, *GROUP)
    # Rank 0 had begun: its directory and its lock may be there.
    assert {path.name for path in root.glob("out/*")} <= {".dcpx.lock"}
    load = {"state_dict": state, "checkpoint_id": root / "good", "options": READ}
    wrongs = [{"planner": DefaultSavePlanner()}, {"options": WRITE}, {"storage_reader": 3}]
    wrongs += [{"strict": "no"}, {"cast": "maybe"}, {"allow_missing": "w"}, {"key_map": 3}]
    fails_on_both(dcpx.load, load, *states, *wrongs, *GROUP)
    model = nn.Linear(2, 2)
    wrongs = [{"path": 3}, {"model": 3}, {"options": WRITE}, {"strict": 3}]
    given = {"model": model, "path": root / "good", "options": READ}
    fails_on_both(dcpx.load_pretrained, given, *wrongs, *GROUP)
    given = {"source": model, "path": root / "artifact", "options": WRITE}
    wrongs = [{"path": model}, {"source": 3}, {"keys": 3}, {"options": READ}]
    fails_on_both(dcpx.export, given, *wrongs, *GROUP)
    assert not (root / "artifact").exists()


def calls_of_a_manager_fail_on_both(root: Path) -> None:
    model = nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    parts = {"model": 3}, {"lr_scheduler": adam}, {"dataloader": adam}
    with CheckpointManager(root / "run", options=WRITE, read_options=READ) as manager:
        manager.save(1, model=model)
        manager.wait()
        save = {"tag_or_step": 2, "model": model}
        wrongs = [{"state": [1]}, {"metrics": 3}, {"metrics": {"a": "1"}}, {"step": "x"}]
        fails_on_both(manager.save, save, *parts, *wrongs)
        wrongs = [{"tag": 1.5}, {"strict": 3}, {"allow_missing": "x"}, {"cast": 3}]
        wrongs += [{"load_optimizer": "no"}, {"fallback": 3}, {"merge": 3}, {"translate": 3}]
        fails_on_both(manager.resume, {"model": model}, *parts[1:2], *wrongs)
        for call in (manager.pin, manager.unpin, manager.delete):
            fails_on_both(call, {"tag": 1}, {"tag": None})
        fails_on_both(manager.export, {"tag_or_model": 1, "path": root / "x"}, {"path": 3})
        fails_on_both(manager.dry_run, {"translate": KeyMap()}, {"translate": 3})
        fails_on_both(manager.save_on_signal, {"time_left_s": 1}, {"time_left_s": "soon"})
        assert (manager.resume(model=model).tag, manager.tags()) == ("step-1", ["step-1"])
    with CheckpointManager(root / "run", save_every=5, options=WRITE) as manager:
        fails_on_both(manager.should_save, {"step": 1}, {"step": "1"})
    with CheckpointManager(root / "run", save_every_s=600, options=WRITE) as manager:
        if dist.get_rank() == 1:
            manager.close()
        with pytest.raises(OptionError, match="closed"):
            manager.should_save(1)


@pytest.mark.multirank
def test_wrong_argument_of_one_rank_is_the_error_of_both(ranks: StartRanks, tmp_path: Path) -> None:
    ranks(2)(calls_fail_on_both, tmp_path / "calls")
    ranks(2)(calls_of_a_manager_fail_on_both, tmp_path / "manager")
