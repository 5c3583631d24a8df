"""Hints of `resume`, and those for arguments: each text is followed, and the call works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hints import arguments, assert_loads, save_models, save_state, state, text_of
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxError,
    MismatchError,
    NotCommittedError,
    OptionError,
    ReadOptions,
    UnsupportedError,
    WriteOptions,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_state(tmp_path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return save_models(tmp_path)


# ---- resume: arguments that it has --------------------------------------------------------------


def training(hidden: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, hidden)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_resume_without_a_saved_optimizer_names_arguments_of_resume(root: Path) -> None:
    model, optimizer = training()
    before = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    with CheckpointManager(root) as manager:
        text = text_of(MismatchError, lambda: manager.resume(model=model, optimizer=optimizer))
        assert "key_map" not in text
        found = arguments(text)
        assert set(found) == {"load_optimizer", "strict"}
        for name, value in found.items():
            manager.resume(model=model, optimizer=optimizer, **{name: value})
        assert "allow_missing=[globs]" in text
        manager.resume(model=model, optimizer=optimizer, allow_missing=["optimizer.*"])
    for name, value in optimizer.state[model.weight].items():
        assert torch.equal(value, before[name])


def test_resume_of_a_larger_optimizer_names_arguments_that_leave_the_new_states(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    part = torch.optim.AdamW(model[0].parameters())
    model(torch.ones(1, 2)).sum().backward()
    part.step()
    with CheckpointManager(tmp_path / "root", async_save=False) as manager:
        manager.save(1, model=model, optimizer=part)
        whole = torch.optim.AdamW(model.parameters())
        whole.step()
        text = text_of(MismatchError, lambda: manager.resume(model=model, optimizer=whole))
        found = arguments(text)
        assert {"strict", "load_optimizer"} <= set(found)
        for name, value in found.items():
            manager.resume(model=model, optimizer=whole, **{name: value})
        manager.resume(model=model, optimizer=whole, allow_missing=["optimizer.*"])


class Loader:
    def state_dict(self) -> dict[str, Any]:
        return {"at": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("part", ["lr_scheduler", "dataloader"])
def test_resume_of_a_part_that_was_not_saved_names_arguments_of_resume(
    root: Path, part: str
) -> None:
    model, optimizer = training()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given: Any = scheduler if part == "lr_scheduler" else Loader()
    with CheckpointManager(root) as manager:
        text = text_of(MismatchError, lambda: manager.resume(model=model, **{part: given}))
        found = arguments(text)
        assert set(found) == {"allow_missing", "strict"}
        for name, value in found.items():
            manager.resume(model=model, **{part: given, name: value})


def test_resume_of_other_dtypes_names_an_argument_of_resume(root: Path) -> None:
    model = nn.Linear(2, 3).double()
    with CheckpointManager(root) as manager:
        text = text_of(MismatchError, lambda: manager.resume(model=model))
        assert manager.resume(model=model, **arguments(text)).tag == "step-2"
    assert model.weight.dtype == torch.float64


def test_root_without_a_checkpoint_names_the_argument_of_the_manager(tmp_path: Path) -> None:
    (tmp_path / "root" / "step-3").mkdir(parents=True)
    (tmp_path / "root" / "step-3" / "__0_0.distcp").write_bytes(b"x")
    manager = CheckpointManager(tmp_path / "root")
    text = text_of(NotCommittedError, lambda: manager.resume(model=nn.Linear(2, 3)))
    (call,) = re.findall(r"CheckpointManager\(\.\.\., (\w+=\w+)\)", text)
    fresh = CheckpointManager(tmp_path / "root", **arguments(call))
    assert fresh.resume(model=nn.Linear(2, 3)).is_fresh


def test_tag_that_is_not_there_names_those_that_are(root: Path) -> None:
    with CheckpointManager(root) as manager:
        text = text_of(NotCommittedError, lambda: manager.resume(model=nn.Linear(2, 3), tag=7))
        (meant,) = re.findall(r"did you mean '([^']+)'\?", text)
        assert manager.resume(model=nn.Linear(2, 3), tag=Path(meant).name).tag == "step-2"


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
    assert text.endswith("give options by name, options=")
    assert_loads(
        tmp_path / "b", storage_reader=dcpx.DcpxReader(tmp_path / "b", options=ReadOptions())
    )


def test_tilde_names_two_paths_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    text = text_of(OptionError, lambda: dcpx.save(state(), "~/ckpt"))
    for path in re.findall(r"'((?:/|\./)[^']+)'", text):
        dcpx.save(state(), path)
        assert_loads(path)
    assert (tmp_path / "home" / "ckpt").is_dir()
    assert (tmp_path / "~" / "ckpt").is_dir()


@pytest.mark.parametrize("begin", [dcpx.save, dcpx.async_save])
def test_value_that_pickle_refuses_is_named_and_the_rest_is_saved(
    tmp_path: Path, begin: Any
) -> None:
    bad = {"a": {"b": lambda: 0}, "w": torch.ones(2)}

    def both() -> None:
        handle = begin(bad, tmp_path / "ckpt")
        if begin is dcpx.async_save:
            handle.result()

    text = text_of(UnsupportedError, both)
    assert text.startswith("'a.b' cannot be pickled")
    assert "\n" not in text
    assert not (tmp_path / "ckpt" / ".metadata").exists()
    del bad["a"]
    both()
    dcpx.close()
    assert dcpx.load({"w": torch.zeros(2)}, tmp_path / "ckpt").is_whole


def test_export_of_objects_names_the_format_that_keeps_them(tmp_path: Path) -> None:
    for number, more in enumerate(({}, {"keys": ["*"]})):
        source = {"a": 1} if not more else {"a": 1, "w": torch.ones(2)}
        path = tmp_path / str(number)
        text = text_of(
            DcpxError,
            lambda source=source, path=path, more=more: dcpx.export(source, path, **more),
        )
        assert "1 object" in text
        assert "1 objects" not in text
        dcpx.export(source, path, **more, format=arguments(text)["format"])
        assert (path / "pytorch_model.bin").exists()


def test_glob_that_matches_nothing_names_what_there_is(tmp_path: Path) -> None:
    text = text_of(DcpxError, lambda: dcpx.export(state(), tmp_path / "x", keys=["model.weigth"]))
    (meant, *_) = re.findall(r"such as '([^']+)'", text)
    assert dcpx.export(state(), tmp_path / "x", keys=[meant]).tensors == 1


def test_save_over_a_checkpoint_shows_no_warning_of_stocks(
    saved: Path, recwarn: pytest.WarningsRecorder
) -> None:
    dcpx.save(state(), saved)
    assert [str(one.message) for one in recwarn] == []
