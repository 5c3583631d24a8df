"""What an error recommends works: its text names a path, a command or an argument that is tried."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from support.saves import change, read_footer
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    CorruptionError,
    DcpxError,
    KeyMap,
    MismatchError,
    NotCommittedError,
    OptionError,
    ReadOptions,
    RepairError,
    ShortReadError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.cli.app import app

ARGUMENT = re.compile(r"\b(\w+)=('[^']*'|\[[^\]]*\]|True|False|KeyMap\(\))")


def state(value: float = 1.0) -> dict[str, Any]:
    weight, bias = torch.full((3, 2), float(value)), torch.full((2,), float(value))
    return {"model": {"weight": weight, "bias": bias}, "step": 3}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `state()`."""
    dcpx.save(state(), tmp_path / "runs" / "ckpt-10")
    return tmp_path / "runs" / "ckpt-10"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A manager's, with two steps of a small model."""
    with CheckpointManager(tmp_path / "root", async_save=False) as manager:
        manager.save(1, model=nn.Linear(2, 3))
        manager.save(2, model=nn.Linear(2, 3))
    return tmp_path / "root"


def text_of(kind: type[DcpxError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def run(text: str, *, code: int = 0) -> Result:
    """Runs the command that a text names."""
    (command,) = re.findall(r"`dcpx ([^`]+)`", text)
    result = CliRunner().invoke(app, command.split(), prog_name="dcpx")
    assert result.exit_code == code, result.output
    return result


def arguments(text: str) -> dict[str, Any]:
    """Returns the arguments that a text names, each with its value."""
    found = [match for match in ARGUMENT.findall(text) if match[1] != "[globs]"]
    return {name: eval(value, {"KeyMap": KeyMap}) for name, value in found}


def assert_loads(path: str | Path, **options: Any) -> None:
    target = state(0)
    dcpx.load(target, path, **options)
    assert torch.equal(target["model"]["weight"], torch.ones(3, 2))


def load_text(kind: type[DcpxError], path: Path) -> str:
    return text_of(kind, lambda: dcpx.load(state(0), path))


# ---- No checkpoint, or a damaged one ------------------------------------------------------------


def test_load_of_a_managers_root_names_the_checkpoints_beneath(root: Path) -> None:
    calls: list[Callable[[Path], Any]] = [
        lambda path: dcpx.load({"model": nn.Linear(2, 3).state_dict()}, path),
        lambda path: dcpx.load_pretrained(nn.Linear(2, 3), path),
        lambda path: dcpx.export(path, root.parent / "artifact"),
    ]
    for call in calls:
        text = text_of(NotCommittedError, lambda call=call: call(root))
        assert "step-1" in run(text).output
        names = re.findall(r"'(step-\d)'", text)
        assert names == ["step-2", "step-1"]
        call(root / names[0])
        assert "CheckpointManager.resume" in text
    assert CheckpointManager(root).resume(model=nn.Linear(2, 3)).tag == "step-2"
    assert "step-1" in run(text_of(RepairError, lambda: dcpx.repair(root))).output


def test_path_beside_a_checkpoint_names_it(saved: Path) -> None:
    text = load_text(NotCommittedError, saved.with_name("ckpt-1O"))
    (meant,) = re.findall(r"did you mean '([^']+)'\?", text)
    assert_loads(meant)
    text = load_text(NotCommittedError, saved.with_name("x"))
    assert "'ckpt-10'" in text and "ckpt-10" in run(text).output
    for name in ("__0_0.distcp", ".metadata"):
        text = load_text(NotCommittedError, saved / name)
        (meant,) = re.findall(r"directory, '([^']+)'", text)
        assert_loads(meant)


def follow_repair(text: str) -> None:
    """Runs `dcpx repair`, which refuses, and what it says in its turn."""
    run(run(text, code=1).output.replace("\n", " "))


GARBAGE = [b"", b"hello, world " * 20, b"\x80\x04 this is no metadata", bytes(range(256)), b"\xd2"]


def test_lost_or_damaged_metadata_name_repair_in_plain_words(saved: Path) -> None:
    file = saved / ".metadata"
    good = file.read_bytes()
    file.unlink()
    text = load_text(NotCommittedError, saved)
    assert "1 data file" in text
    follow_repair(text)
    assert_loads(saved)
    for garbage in (*GARBAGE, good[:-10]):
        file.write_bytes(garbage)
        text = load_text(CorruptionError, saved)
        assert not re.search(r"memo|opcode|\bSTOP\b|unpickle", text, re.IGNORECASE), text
        follow_repair(text)
        assert_loads(saved)
    file.write_bytes(good[:30] + bytes([good[30] ^ 1]) + good[31:])
    run(load_text(CorruptionError, saved))
    assert_loads(saved)


def test_damaged_data_name_verify_which_finds_them(saved: Path) -> None:
    file = saved / "__0_0.distcp"
    change(file, read_footer(file).row("model.weight").payload_offset, b"\x01\x02")
    text = load_text(CorruptionError, saved)
    assert "'model.weight'" in text and "model.weight" in run(text, code=1).output
    with file.open("r+b") as opened:
        opened.truncate(100)
    assert file.name in run(load_text(ShortReadError, saved), code=1).output
    file.unlink()
    assert file.name in run(load_text(DcpxError, saved), code=1).output


def test_several_safetensors_files_name_one_that_loads(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dcpx.export({"weight": torch.ones(2, 2)}, tmp_path / f"{name}.safetensors")
    model = nn.Linear(2, 2, bias=False)
    text = text_of(NotCommittedError, lambda: dcpx.load_pretrained(model, tmp_path))
    (meant,) = re.findall(r"such as '([^']+)'", text)
    assert dcpx.load_pretrained(model, meant).is_whole


# ---- A state that does not fit ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ({"model": {"w": torch.ones(2)}}, {"w": torch.zeros(2)}),
        ({"w": torch.ones(2)}, {"model": {"w": torch.zeros(2)}}),
        ({"net": {"a": {"w": torch.ones(2)}}}, {"a": {"w": torch.zeros(2)}}),
    ],
)
def test_state_nested_otherwise_is_told_how_to_load_it(
    tmp_path: Path, stored: dict[str, Any], wanted: dict[str, Any]
) -> None:
    dcpx.save(stored, tmp_path / "ckpt")
    text = text_of(MismatchError, lambda: dcpx.load(wanted, tmp_path / "ckpt"))
    assert "KeyMap" not in text, "which leads to the same error"
    (target,) = re.findall(r"load\((.+), \.\.\.\)", text)
    assert dcpx.load(eval(target, {"state_dict": wanted}), tmp_path / "ckpt").is_whole
    while isinstance(wanted, dict):
        (wanted,) = wanted.values()
    assert torch.equal(wanted, torch.ones(2))


def test_wrapped_names_are_told_of_a_key_map_that_finds_them(tmp_path: Path) -> None:
    for number, prefix in enumerate(["_orig_mod.", "module.", "a.module."]):
        names = (f"{prefix}w", f"{prefix.replace('module.', '').replace('_orig_mod.', '')}w")
        for stored, wanted in (names, names[::-1]):
            path = tmp_path / str(number) / stored
            dcpx.save({stored: torch.ones(2)}, path)
            target = {wanted: torch.zeros(2)}
            text = text_of(MismatchError, lambda target=target, path=path: dcpx.load(target, path))
            assert "load(" not in text
            dcpx.load(target, path, key_map=arguments(text)["key_map"])
            assert torch.equal(target[wanted], torch.ones(2))


def test_key_map_is_not_offered_where_it_was_given_or_finds_nothing(tmp_path: Path) -> None:
    path, model = tmp_path / "ckpt", nn.Sequential(nn.Linear(2, 2))
    dcpx.save({"module.a.w": torch.ones(2), "a.module.w": torch.ones(2)}, path)
    calls: list[Callable[[], Any]] = [
        lambda: dcpx.load({"a.w": torch.zeros(2)}, path),
        lambda: dcpx.load({"a.w": torch.zeros(2)}, path, key_map=KeyMap()),
        lambda: dcpx.load_pretrained(model, path),
    ]
    assert [call for call in calls if "KeyMap" in text_of(MismatchError, call)] == []


def test_missing_names_and_other_dtypes_name_the_arguments_that_allow_them(saved: Path) -> None:
    target = state(0)
    target["model"] |= {"extra": torch.zeros(1), "bias": torch.zeros(2, dtype=torch.float64)}
    text = text_of(MismatchError, lambda: dcpx.load(target, saved))
    assert "1 name is missing" in text and "1 dtype differs" in text
    found = arguments(text)
    assert set(found) == {"strict", "cast"} and "allow_missing=" in text
    allowed = {"allow_missing": ["*.extra"], "cast": found["cast"]}
    for options in (found, allowed):
        assert dcpx.load(target, saved, **options).missing == ("model.extra",)
    del target["model"]["extra"]
    assert not dcpx.load(target, saved, cast=found["cast"]).is_whole, "a dtype was converted"
    target["model"] = {name: torch.zeros(3) for name in ("a", "b", "weight", "bias")}
    text = text_of(MismatchError, lambda: dcpx.load(target, saved))
    assert "2 names are missing" in text and "2 shapes differ" in text


# ---- resume -------------------------------------------------------------------------------------


def trained(model: nn.Module, *parts: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer that has states: of all parameters, or of parts of the model."""
    optimizer = torch.optim.AdamW([one for part in parts or (model,) for one in part.parameters()])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def test_resume_without_a_saved_optimizer_names_arguments_of_resume(root: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = trained(model)
    before = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    with CheckpointManager(root) as manager:
        text = text_of(MismatchError, lambda: manager.resume(model=model, optimizer=optimizer))
        assert "key_map" not in text
        found = arguments(text)
        assert set(found) == {"load_optimizer", "strict"} and "allow_missing=" in text
        for options in (*({each: found[each]} for each in found), {"allow_missing": ["opt*"]}):
            manager.resume(model=model, optimizer=optimizer, **options)
    for name, value in optimizer.state[model.weight].items():
        assert torch.equal(value, before[name])


def test_resume_of_a_larger_optimizer_names_arguments_that_leave_the_new_states(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with CheckpointManager(tmp_path / "root", async_save=False) as manager:
        manager.save(1, model=model, optimizer=trained(model, model[0]))
        whole = trained(model)
        text = text_of(MismatchError, lambda: manager.resume(model=model, optimizer=whole))
        found = arguments(text)
        assert {"strict", "load_optimizer"} <= set(found)
        for options in (*({each: found[each]} for each in found), {"allow_missing": ["opt*"]}):
            manager.resume(model=model, optimizer=whole, **options)


class Loader:
    def state_dict(self) -> dict[str, Any]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_resume_of_what_was_saved_otherwise_names_arguments_of_resume(root: Path) -> None:
    model = nn.Linear(2, 3)
    scheduler = torch.optim.lr_scheduler.StepLR(trained(model), 1)
    with CheckpointManager(root) as manager:
        for part in ({"lr_scheduler": scheduler}, {"dataloader": Loader()}):
            given: dict[str, Any] = {"model": model, **part}
            text = text_of(MismatchError, lambda given=given: manager.resume(**given))
            found = arguments(text)
            assert set(found) == {"allow_missing", "strict"}
            for name, value in found.items():
                manager.resume(**given, **{name: value})
        model = nn.Linear(2, 3).double()
        text = text_of(MismatchError, lambda: manager.resume(model=model))
        assert manager.resume(model=model, **arguments(text)).tag == "step-2"
        assert model.weight.dtype == torch.float64
        text = text_of(NotCommittedError, lambda: manager.resume(model=model, tag=7))
        (meant,) = re.findall(r"did you mean '([^']+)'\?", text)
        assert Path(meant).name == "step-2"


def test_root_without_a_checkpoint_names_the_argument_of_the_manager(tmp_path: Path) -> None:
    (tmp_path / "root" / "step-3").mkdir(parents=True)
    (tmp_path / "root" / "step-3" / "__0_0.distcp").write_bytes(b"x")
    manager = CheckpointManager(tmp_path / "root")
    text = text_of(NotCommittedError, lambda: manager.resume(model=nn.Linear(2, 3)))
    (call,) = re.findall(r"CheckpointManager\(\.\.\., (\w+=\w+)\)", text)
    fresh = CheckpointManager(tmp_path / "root", **arguments(call))
    assert fresh.resume(model=nn.Linear(2, 3)).is_fresh


# ---- Arguments ----------------------------------------------------------------------------------


def test_module_options_and_rules_name_what_to_write(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    text = text_of(OptionError, lambda: dcpx.save(model, tmp_path / "a"))
    for written in (r'{"model": model}', "model.state_dict()"):
        assert written in text
        dcpx.save(eval(written, {"model": model}), tmp_path / "a")
    options: Any = {"workers": 2}
    text = text_of(OptionError, lambda: dcpx.save(state(), tmp_path / "b", options=options))
    (written,) = re.findall(r"write (\w+\(\*\*options\))", text)
    names = {"WriteOptions": WriteOptions, "options": options}
    dcpx.save(state(), tmp_path / "b", options=eval(written, names))
    text = text_of(OptionError, lambda: dcpx.DcpxReader(tmp_path / "b", ReadOptions()))  # type: ignore[arg-type]
    assert "options=" in text
    reader = dcpx.DcpxReader(tmp_path / "b", options=ReadOptions())
    assert_loads(tmp_path / "b", storage_reader=reader)


def test_tilde_names_two_paths_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    text = text_of(OptionError, lambda: dcpx.save(state(), "~/ckpt"))
    for path in re.findall(r"'((?:/|\./)[^']+)'", text):
        dcpx.save(state(), path)
        assert_loads(path)
    assert (tmp_path / "home" / "ckpt").is_dir() and (tmp_path / "~" / "ckpt").is_dir()
    assert "no such user" in text_of(OptionError, lambda: dcpx.save(state(), b"~nobody-here/ckpt"))


def test_value_that_pickle_refuses_is_named_and_the_rest_is_saved(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"a": {"b": lambda: 0}, "w": torch.ones(2)}
    begins: list[Callable[[Any], Any]] = [
        lambda state: dcpx.save(state, tmp_path / "0"),
        lambda state: dcpx.async_save(state, tmp_path / "1").result(),
    ]
    for number, begin in enumerate(begins):
        text = text_of(UnsupportedError, lambda begin=begin: begin(bad))
        assert "'a.b'" in text and "\n" not in text
        assert not (tmp_path / str(number) / ".metadata").exists()
        begin({"w": bad["w"]})
        dcpx.close()
        assert dcpx.load({"w": torch.zeros(2)}, tmp_path / str(number)).is_whole


def test_export_names_the_format_that_keeps_objects_and_the_names_that_are_there(
    tmp_path: Path,
) -> None:
    for number, more in enumerate(({}, {"keys": ["*"]})):
        source = {"a": 1} if not more else {"a": 1, "w": torch.ones(2)}
        path = tmp_path / str(number)
        text = text_of(
            DcpxError,
            lambda source=source, path=path, more=more: dcpx.export(source, path, **more),
        )
        assert "1 object" in text and "1 objects" not in text
        dcpx.export(source, path, **more, format=arguments(text)["format"])
        assert (path / "pytorch_model.bin").exists()
    text = text_of(DcpxError, lambda: dcpx.export(state(), tmp_path / "x", keys=["model.weigth"]))
    (meant, *_) = re.findall(r"such as '([^']+)'", text)
    assert dcpx.export(state(), tmp_path / "x", keys=[meant]).tensors == 1


def test_save_over_a_checkpoint_shows_no_warning_of_stocks(
    saved: Path, recwarn: pytest.WarningsRecorder
) -> None:
    dcpx.save(state(), saved)
    assert [str(one.message) for one in recwarn] == []
