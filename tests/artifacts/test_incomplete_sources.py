"""Sources that hold nothing, or not what is asked for; indices that do not name what is held."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx.reader.pretrained_reader import stored_sizes

SHARDS = {"1.safetensors": ("a", "b"), "2.safetensors": ("c", "d")}


def write_shards(path: Path, weight_map: str) -> None:
    """Writes two files, and an index with this text for its map."""
    for file, names in SHARDS.items():
        st.save_file({name: torch.ones(2) for name in names}, path / file)
    text = f'{{"metadata": {{"total_size": 32}}, "weight_map": {weight_map}}}'
    (path / "model.safetensors.index.json").write_text(text)


def whole_map() -> dict[str, str]:
    return {name: file for file, names in SHARDS.items() for name in names}


def refusals(path: Path) -> list[str]:
    """Returns the texts of the errors of all that reads the index."""
    model = nn.ParameterDict({name: torch.zeros(2) for name in "ab"})
    texts = []
    for read in (
        lambda: dcpx.load_pretrained(model, path, strict=False),
        lambda: dcpx.export(path, path / "out"),
        lambda: stored_sizes(path),
    ):
        with pytest.raises(dcpx.CorruptionError) as raised:
            read()
        texts.append(str(raised.value))
    assert not model["a"].any() and not (path / "out").exists()
    return texts


def test_index_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    twice = json.dumps(whole_map()).replace("{", '{"a": "2.safetensors", ', 1)
    write_shards(tmp_path, twice)
    assert all("'a' is there twice" in text for text in refusals(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}, "weight_map": {}}')
    assert all("'weight_map' is there twice" in text for text in refusals(tmp_path))


def test_index_that_lacks_what_a_file_holds_decides_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lacking = {name: file for name, file in whole_map().items() if name != "d"}
    write_shards(tmp_path, json.dumps(lacking))
    assert stored_sizes(tmp_path).keys() == set("abc")
    left = "left out 1 tensor of '2.safetensors' that the index does not name there, such as 'd'"
    assert left in caplog.text
    dcpx.export(tmp_path, tmp_path / "out", no_dist=True)
    assert dcpx.load_tensors(tmp_path / "out").keys() == set("abc")


@pytest.mark.parametrize("file_format", ["safetensors", "torch"])
def test_export_of_nothing_is_refused_and_leaves_what_is_there(
    tmp_path: Path, file_format: Any
) -> None:
    w = {"w": torch.ones(2)}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"ema": w, "model": w}, {"key_map": dcpx.KeyMap({"w": None})}),
        (w, {"keys": []}),
    ]
    for number, (state, arguments) in enumerate(cases):
        dcpx.save(dict(state), tmp_path / str(number))
        for source in (state, tmp_path / str(number)):
            with pytest.raises(dcpx.PlanError, match=r"there is no tensor to export"):
                dcpx.export(source, tmp_path / "out", format=file_format, **arguments)
            assert not (tmp_path / "out").exists(), number
    report = dcpx.export({"w": torch.ones(0, 4)}, tmp_path / "out", format=file_format)
    assert report.tensors == 1


def test_objects_alone_are_an_artifact_of_torch_and_none_of_safetensors(tmp_path: Path) -> None:
    with pytest.raises(dcpx.PlanError, match="1 object, which safetensors cannot hold"):
        dcpx.export({"step": 7}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    dcpx.export({"step": 7}, tmp_path / "out", format="torch")
    held = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert held == {"step": 7}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(2, 2, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})


class Net(nn.Module):
    def __init__(self, layers: int = 28) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


def save_base(path: Path) -> None:
    st.save_file({n: t for n, t in Net().state_dict().items() if "lora" not in n}, path)


def wrapped() -> nn.Module:
    return nn.ModuleDict({"base": Net()})


@pytest.mark.parametrize("kind", ["file", "folder", "checkpoint"])
def test_nothing_of_a_model_is_a_mismatch_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors" if kind == "file" else tmp_path
    if kind == "checkpoint":
        dcpx.save(Net().state_dict(), tmp_path, no_dist=True)
    else:
        save_base(tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = wrapped()
    rules: Any
    for rules in ({}, {"strict": False}, {"allow_missing": ["*"]}):
        with pytest.raises(dcpx.MismatchError) as raised:
            dcpx.load_pretrained(model, path, no_dist=True, **rules)
        text, error = str(raised.value), raised.value
        assert "holds nothing of what is asked for" in text and "strict=False" not in text
        assert "28 of `base.layers.*.q.weight`" in text
        assert "did you mean 'layers.0.q.weight'?" in text
        assert error.missing is not None and len(error.missing) == 56
        assert all(one.is_meta for one in model.parameters())


@pytest.mark.parametrize("rules", [{}, {"strict": False}])
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "wanted"])
def test_prefix_of_all_names_is_told_with_the_key_map_that_adds_or_takes_it(
    tmp_path: Path, rules: dict[str, Any], is_stored: bool
) -> None:
    plain, within = nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict()
    within["a"] = nn.ModuleDict({"b": nn.Sequential(nn.Linear(2, 2))})
    source, model = (within, plain) if is_stored else (plain, within)
    st.save_file(source.state_dict(), path := tmp_path / "model.safetensors")
    with pytest.raises(dcpx.MismatchError) as raised:
        dcpx.load_pretrained(model, path, no_dist=True, **rules)
    (written,) = re.findall(r"names lack 'a\.b\.': key_map=(KeyMap\(.*\))$", str(raised.value))
    key_map = eval(written, {"KeyMap": dcpx.KeyMap})
    assert dcpx.load_pretrained(model, path, no_dist=True, key_map=key_map, **rules).is_whole
    for one, other in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(one, other)


def test_model_and_adapter_of_peft_are_told_apart(tmp_path: Path) -> None:
    save_base(base := tmp_path / "base.safetensors")
    with pytest.raises(dcpx.MismatchError, match="load the base first, get_peft_model wraps"):
        dcpx.load_pretrained(wrapped(), base, no_dist=True)
    found = {f"base_model.{n}": t for n, t in Net().state_dict().items() if "lora" in n}
    st.save_file(found, adapter := tmp_path / "adapter_model.safetensors")
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q": nn.Linear(2, 2)})])})
    with pytest.raises(dcpx.MismatchError, match=r"adapter of peft: PeftModel\.from_pretrained\("):
        dcpx.load_pretrained(model, adapter, no_dist=True)


def test_part_of_a_model_is_counted_first_and_the_rest_grouped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_base(tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING, "torch_dcpx"):
        report = dcpx.load_pretrained(Net(), tmp_path, strict=False, no_dist=True)
    assert len(report.missing) == 28
    (said,) = caplog.messages
    assert said.startswith(f"loaded 28 names, 448 B, from '{tmp_path}/model.safetensors'; ")
    assert said.endswith("28 of `layers.*.lora_A.default.weight`")
    with pytest.raises(dcpx.MismatchError) as raised:
        dcpx.load_pretrained(Net(), tmp_path, no_dist=True)
    text = str(raised.value)
    assert "missing: 28 of `layers.*.lora_A.default.weight`\n" in text
    assert text.count("lora_A") == 4
    # A model without names loads nothing in peace.
    assert dcpx.load_pretrained(nn.ReLU(), tmp_path, strict=False, no_dist=True).items == 0


def test_index_decides_which_of_two_tensors_is_loaded(tmp_path: Path) -> None:
    new, old = torch.full((2, 2), 7.0), torch.full((2, 2), -1.0)
    st.save_file({"0.weight": new}, tmp_path / "model-00001-of-00002.safetensors")
    second = {"0.weight": old, "1.weight": new, "gone.weight": old.clone()}
    st.save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {f"{i}.weight": f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for path in (tmp_path, index):
        dcpx.load_pretrained(model, path, no_dist=True)
        assert all(torch.equal(one, new) for one in model.parameters())
        assert set(dcpx.load_tensors(path)) == set(weight_map)
    report = dcpx.verify(tmp_path)
    assert report.ok
    assert [n.fqns for n in report.notes if n.kind == "leftover"] == [("0.weight", "gone.weight")]
