"""`manager.export`: an artifact of a tag that stays while it is written, or of a live model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from support.states import assert_same
from trainings import Patch, Training, manager_of, save_steps

import torch_dcpx as dcpx
from torch_dcpx.artifacts import export as export_artifact


@pytest.fixture
def training(tmp_path: Path) -> Training:
    training = Training()
    training.train(1)
    manager_of(tmp_path / "root").save(1, **training.parts, state={"ema": torch.ones(3)})
    return training


@pytest.mark.parametrize("source", [1, "step-1", "model"])
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_artifact_is_the_model(tmp_path: Path, training: Training, source: Any, kind: Any) -> None:
    manager = manager_of(tmp_path / "root")
    given = training.model if source == "model" else source
    report = manager.export(given, tmp_path / "out", format=kind)
    out = tmp_path / "out" / report.files[0]
    found = torch.load(out, weights_only=True) if kind == "torch" else st.load_file(out)
    expected = {name: value.detach() for name, value in training.model.state_dict().items()}
    assert found.keys() == expected.keys()
    assert_same({name: found[name] for name in expected}, dict(expected))


def test_options_are_those_of_the_export(tmp_path: Path, training: Training) -> None:
    manager = manager_of(tmp_path / "root")
    rules = dcpx.KeyMap(
        dcpx.Split(r"(\d)\.weight", [r"\1.a", r"\1.b"], dim=1, sizes=None), ("^0", "first")
    )
    with pytest.raises(dcpx.PlanError, match="cannot be split"):
        manager.export(1, tmp_path / "out", key_map=rules)
    rules = dcpx.KeyMap(dcpx.Split(r"0\.weight", ["a", "b"], sizes=[3, 4]), ("^0", "first"))
    report = manager.export(1, tmp_path / "out", key_map=rules, max_shard_bytes="60B")
    assert len(report.files) == 5
    held = [set(st.load_file(tmp_path / "out" / file)) for file in report.files]
    assert set.union(*held) == {"a", "b", "first.bias", "1.weight", "1.bias"}
    keys = (glob for glob in ("state.*", "optimizer.state.0.weight.*"))
    report = manager.export("step-1", tmp_path / "all.safetensors", keys=keys)
    assert set(st.load_file(tmp_path / "all.safetensors")) == {
        "state.ema",
        *(f"optimizer.state.0.weight.{key}" for key in ("exp_avg", "exp_avg_sq", "step")),
    }
    options = dcpx.WriteOptions(durability="none", host_memory_bytes=1 << 20, slot_bytes=256 << 10)
    assert manager.export(training.model, tmp_path / "live", options=options).tensors == 4


def test_checkpoint_stays_in_an_export(
    tmp_path: Path, training: Training, monkeypatch: Patch
) -> None:
    manager = manager_of(tmp_path / "root", keep_last=1)
    save_steps(manager, 2)  # what follows is not the last one
    real = export_artifact._Export.write
    seen: list[list[str]] = []

    def meanwhile(self: Any) -> None:
        save_steps(manager, 3)
        seen.append(manager.tags())
        real(self)

    monkeypatch.setattr(export_artifact._Export, "write", meanwhile)
    manager = manager_of(tmp_path / "root", keep_last=1)
    manager.export(2, tmp_path / "out", keys="*x")
    assert seen == [["step-2", "step-3"]]
    assert st.load_file(tmp_path / "out" / "model.safetensors")["state.x"].tolist() == [2.0] * 3
    save_steps(manager, 4)
    assert manager.tags() == ["step-4"]


def test_what_cannot_be_exported_is_refused_at_once(tmp_path: Path, training: Training) -> None:
    manager = manager_of(tmp_path / "root")
    save_steps(manager, 2)
    (tmp_path / "root" / "step-3").mkdir()
    out = tmp_path / "out"
    refused: list[tuple[Any, Any, dict[str, Any]]] = [
        (dcpx.MismatchError, 2, {}),
        (dcpx.NotCommittedError, 3, {}),
        (dcpx.OptionError, None, {}),
        (dcpx.OptionError, -1, {}),
        (dcpx.OptionError, 1, {"format": "onnx"}),
        (dcpx.OptionError, 1, {"max_shard_bytes": "5 apples"}),
        (dcpx.OptionError, 1, {"key_map": {"a": "b"}}),
        (dcpx.PlanError, 1, {"keys": ["none*"]}),
    ]
    for kind, source, arguments in refused:
        with pytest.raises(kind):
            manager.export(source, out, **arguments)
    with pytest.raises(
        dcpx.MismatchError, match="no model was saved there, but state; keys= names"
    ):
        manager.export(2, out)
    assert not out.exists()
    assert manager.export(2, out, keys="state.*").tensors == 1
    manager.close()
    with pytest.raises(dcpx.OptionError, match="closed"):
        manager.export(1, out)
