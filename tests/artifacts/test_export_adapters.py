"""`merge_lora=` and `config=` of an export: a model with its adapter in it, and files beside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from click.testing import CliRunner

import torch_dcpx as dcpx
from torch_dcpx import DcpxError, KeyMap, OptionError, PlanError, UnsupportedError, WriteOptions
from torch_dcpx.cli.app import app

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}
PREFIX = "base_model.model."
SMALL = WriteOptions(host_memory_bytes=4 << 20)  # so that a weight is read in several boxes


def adapter(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    st.save_file({f"{PREFIX}{name}": one for name, one in tensors.items()}, path / NAME)
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


NAME = "adapter_model.safetensors"


def factors(name: str, out: int, width: int, r: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"{name}.lora_A.weight": torch.randn(r, width),
        f"{name}.lora_B.weight": torch.randn(out, r),
    }


def product(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["checkpoint", "of peft", "files"])
def test_merged_weights_are_the_sum_to_the_bit(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(0)
    base = {"q.weight": torch.randn(900, 700).to(dtype), "q.bias": torch.randn(900).to(dtype),
            "norm.weight": torch.randn(700).to(dtype)}  # fmt: skip
    tensors = factors("q", 900, 700)
    path = adapter(tmp_path / "adapter", {**tensors, "norm.weight": torch.ones(700)})
    if kind == "files":
        (tmp_path / "base").mkdir()
        st.save_file(base, tmp_path / "base" / "model.safetensors")
    elif kind == "checkpoint":
        dcpx.save({"model": base, "step": 3}, tmp_path / "base")
    else:
        names = {"q.weight": "q.base_layer.weight", "q.bias": "q.base_layer.bias",
                 "norm.weight": "norm.original_module.weight"}  # fmt: skip
        state = {f"{PREFIX}{names[name]}": one for name, one in base.items()}
        more = {n.replace(".weight", ".default.weight"): one for n, one in tensors.items()}
        more["norm.modules_to_save.default.weight"] = torch.zeros(700)
        state |= {f"{PREFIX}{name}": one for name, one in more.items()}
        dcpx.save({"model": state, "step": 3}, tmp_path / "base")
    dcpx.export(tmp_path / "base", tmp_path / "out", merge_lora=path, options=SMALL)
    found = st.load_file(tmp_path / "out" / "model.safetensors")
    expected = base["q.weight"].clone()
    expected += product(tensors, "q") * (6 / 4)
    assert found.keys() == base.keys()
    assert torch.equal(found["q.weight"], expected)
    assert torch.equal(found["q.bias"], base["q.bias"])
    assert torch.equal(found["norm.weight"], torch.ones(700).to(dtype))


def test_merge_comes_before_the_cast_and_before_the_key_map(tmp_path: Path) -> None:
    dcpx.save({"model": {"q.weight": torch.full((4, 4), 1.0)}}, tmp_path / "base")
    path = adapter(tmp_path / "adapter", tensors := factors("q", 4, 4))
    names = KeyMap((r"^q\.", "query."))
    dcpx.export(
        tmp_path / "base", tmp_path / "o", merge_lora=path, key_map=names, dtype=torch.float16
    )
    found = st.load_file(tmp_path / "o" / "model.safetensors")["query.weight"]
    assert torch.equal(found, (torch.ones(4, 4) + product(tensors, "q") * 1.5).half())


def test_patterns_of_alpha_rslora_and_the_transposed_layers_of_gpt2(tmp_path: Path) -> None:
    base = {f"h.{i}.{n}.weight": torch.randn(6, 6) for i in (0, 1) for n in ("attn", "fc")}
    base |= {"wte.weight": torch.randn(11, 6), "wide.weight": torch.randn(5, 6)}
    dcpx.save(base, tmp_path / "base")
    tensors = factors("h.0.attn", 6, 6) | factors("h.1.fc", 6, 6, 2) | factors("wide", 6, 5)
    tensors |= {
        "wte.lora_embedding_A": torch.randn(4, 11),
        "wte.lora_embedding_B": torch.randn(6, 4),
    }
    path = adapter(
        tmp_path / "a", tensors, fan_in_fan_out=True, use_rslora=True, alpha_pattern={"fc": 10}
    )
    dcpx.export(tmp_path / "base", tmp_path / "out", merge_lora=path)
    found = st.load_file(tmp_path / "out" / "model.safetensors")
    word = tensors["wte.lora_embedding_B"] @ tensors["wte.lora_embedding_A"]
    added = {
        "h.0.attn.weight": product(tensors, "h.0.attn").T * (6 / 2),
        "h.1.fc.weight": product(tensors, "h.1.fc").T * (10 / 2**0.5),
        "wide.weight": product(tensors, "wide").T * (6 / 2),
        "wte.weight": word.T * (6 / 2),
    }
    for name, one in base.items():
        torch.testing.assert_close(found[name], one + added.get(name, 0.0))


WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], type[DcpxError], str]] = {
    "no such layer": ({}, factors("k", 4, 4), PlanError, r"1 weight .*does not hold: 'k.weight'"),
    "other sizes": ({}, factors("q", 3, 4), PlanError, r"\[4, 4\] does not fit \[3, 4\]"),
    "half a pair": ({}, {"q.lora_A.weight": torch.ones(2, 4)}, UnsupportedError, "nothing"),
    "convolution": ({}, {"q.lora_A.weight": torch.ones(2, 4, 3, 3)}, UnsupportedError, "lora_A"),
    "DoRA": ({"use_dora": True}, factors("q", 4, 4), UnsupportedError, "use_dora"),
    "magnitude": ({}, {"q.lora_magnitude_vector": torch.ones(4)}, UnsupportedError, "magnitude"),
    "PiSSA": ({"init_lora_weights": "pissa"}, factors("q", 4, 4), UnsupportedError, "pissa"),
    "another kind": ({"peft_type": "IA3", "r": None}, factors("q", 4, 4), UnsupportedError, "IA3"),
    "no rank": ({"r": None}, factors("q", 4, 4), OptionError, "no config of LoRA"),
    "whole weight": ({}, {"q.weight": torch.ones(3)}, PlanError, r"\[3\]"),
    "integers": ({}, factors("ids", 4, 4), UnsupportedError, "int64, 'ids.weight'"),
}  # fmt: skip


def test_adapter_that_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    state = {"q.weight": torch.ones(4, 4), "ids.weight": torch.ones(4, 4, dtype=torch.int64)}
    dcpx.save(state, tmp_path / "base")
    for name, (config, tensors, error, said) in WRONG.items():
        path = adapter(tmp_path / name, tensors, **config)
        with pytest.raises(error, match=said) as raised:
            dcpx.export(tmp_path / "base", tmp_path / "out", merge_lora=path)
        assert str(path) in str(raised.value)
        assert not list((tmp_path / "out").glob("*")), name


def test_module_in_memory_is_merged_by_peft(tmp_path: Path) -> None:
    path = adapter(tmp_path / "adapter", factors("q", 4, 4))
    with pytest.raises(OptionError, match="merge_and_unload"):
        dcpx.export({"q.weight": torch.ones(4, 4)}, tmp_path / "out", merge_lora=path)
    module: Any = torch.nn.Linear(4, 4)
    with pytest.raises(OptionError, match=r"export\(merge_lora.merge_and_unload\(\), path\)"):
        dcpx.export(tmp_path / "x", tmp_path / "out", merge_lora=module)


def test_other_places_of_an_adapter_work_or_name_the_one_that_does(tmp_path: Path) -> None:
    base, out = {"q.weight": torch.ones(4, 4)}, tmp_path / "out"
    dcpx.save(base, tmp_path / "base")
    (tmp_path / "trained").mkdir()
    path = adapter(tmp_path / "trained" / "mine", tensors := factors("q", 4, 4))
    torch.save(st.load_file(path / NAME), path / "adapter_model.bin")  # as older ones are saved
    for near in (tmp_path / "trained", path / NAME):
        with pytest.raises(OptionError, match="there is no 'adapter_config") as raised:
            dcpx.export(tmp_path / "base", out, merge_lora=near)
        assert str(raised.value).endswith(f"; did you mean '{path}'?")
    with pytest.raises(OptionError, match="nothing is there: `hf download`"):
        dcpx.export(tmp_path / "base", out, merge_lora=tmp_path / "nowhere")
    with pytest.raises(UnsupportedError, match="is a URL; copy it here"):
        dcpx.export(tmp_path / "base", out, merge_lora="s3://bucket/adapter")
    (path / NAME).unlink()
    dcpx.export(tmp_path / "base", out, merge_lora=path)
    expected = base["q.weight"] + product(tensors, "q") * (6 / 4)
    assert torch.equal(dcpx.load_tensors(out)["q.weight"], expected)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(OptionError, match=f"there is no '{NAME}'"):
        dcpx.export(tmp_path / "base", out, merge_lora=path, overwrite=True)


# ---- config= -------------------------------------------------------------------------------------

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "special_tokens_map.json", "vocab.json", "merges.txt", "spiece.model",
         "chat_template.jinja")  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "hub"
    path.mkdir()
    for name in FILES:
        (path / name).write_text(f"{name} of the base")
    for name in ("model.safetensors", "README.md", "pytorch_model.bin", "training_args.json"):
        (path / name).write_text("not copied")
    (path / "tokenizer").mkdir()
    dcpx.save({"model": {"w": torch.ones(3)}}, tmp_path / "ckpt")
    return path


def test_config_copies_configs_and_tokenizer(tmp_path: Path, base: Path) -> None:
    for _ in range(2):  # the second time over its own export
        dcpx.export(tmp_path / "ckpt", tmp_path / "out", config=base, overwrite=True)
        (base / "config.json").write_text("changed")
    found = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()
             if path.name != "model.safetensors"}  # fmt: skip
    assert found == {name: (base / name).read_text() for name in FILES}
    dcpx.export(tmp_path / "ckpt", tmp_path / "net.pt", config=base)
    assert (tmp_path / "config.json").read_text() == "changed"


def test_config_of_the_users_is_not_replaced_and_one_must_be_there(
    tmp_path: Path, base: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("mine")
    with pytest.raises(OptionError, match=re.escape(f"'{out / 'config.json'}' is there")):
        dcpx.export(tmp_path / "ckpt", out, config=base)
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert (out / "config.json").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        with pytest.raises(OptionError, match="config"):
            dcpx.export(tmp_path / "ckpt", tmp_path / "other", config=tmp_path / name)


def test_command_merges_and_copies(tmp_path: Path, base: Path) -> None:
    dcpx.save({"q.weight": torch.zeros(4, 4)}, tmp_path / "base")
    path = adapter(tmp_path / "adapter", tensors := factors("q", 4, 4))
    out = tmp_path / "out"
    line = ["export", tmp_path / "base", out, "--merge-lora", path, "--config", base]
    result = CliRunner().invoke(app, list(map(str, line)))
    assert result.exit_code == 0, result.output
    found = st.load_file(out / "model.safetensors")["q.weight"]
    assert torch.equal(found, product(tensors, "q") * 1.5)
    assert (out / "generation_config.json").exists()
    # Files that are merged stay files.
    line = ["export", out, tmp_path / "again", "--merge-lora", path]
    assert CliRunner().invoke(app, list(map(str, line))).exit_code == 0
    assert (tmp_path / "again" / "model.safetensors").exists()
    line = ["export", out, tmp_path / "more", "--format", "dcp", "--merge-lora", path]
    result = CliRunner().invoke(app, list(map(str, line)))
    assert result.exit_code == 2 and "--merge-lora is for exports" in result.output
