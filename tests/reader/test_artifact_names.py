"""Which file a folder of weights means, by the names in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch
from click.testing import CliRunner

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app
from torch_dcpx.errors import NotCommittedError
from torch_dcpx.reader.safetensors import file_among, names_file
from torch_dcpx.reader.saved_parts import PARTS_NAME

INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FP16 = [one.replace("model", "model.fp16") for one in SHARDS]
LATER = [one.replace("-of-00002", "-of-00002.fp16") for one in SHARDS]
DIFFUSION = [f"diffusion_pytorch_{one}" for one in SHARDS]
BINS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
RANKS = [
    "shard-00001-model-00001-of-00001.safetensors",
    "shard-00002-model-00001-of-00001.safetensors",
]


MEANT: list[tuple[list[str], str | None]] = [
    (["model.safetensors", "x.metadata", "model.safetensors.metadata"], "model.safetensors"),
    (["._model.safetensors", "._.metadata", "x.safetensors"], "x.safetensors"),
    (["._x.safetensors", "x.safetensors"], "x.safetensors"),
    (["model.safetensors", ".metadata"], None),
    (["model.safetensors", "__3.metadata"], None),
    ([INDEX, *SHARDS, "consolidated.safetensors"], INDEX),
    (["model.safetensors", INDEX, *SHARDS], "model.safetensors"),
    ([f"diffusion_pytorch_{INDEX}", *DIFFUSION], f"diffusion_pytorch_{INDEX}"),
    (
        ["diffusion_pytorch_model.safetensors", "x.safetensors"],
        "diffusion_pytorch_model.safetensors",
    ),
    (["model.fp16.safetensors.index.json", *FP16], "model.fp16.safetensors.index.json"),
    (["model.safetensors.index.fp16.json", *LATER], "model.safetensors.index.fp16.json"),
    ([INDEX, *SHARDS, "model.safetensors.index.fp16.json", *LATER], INDEX),
    (["model.fp16.safetensors", "pytorch_model.bin"], "model.fp16.safetensors"),
    (["model-00001-of-00001.safetensors"], "model-00001-of-00001.safetensors"),
    (["adapter_model.safetensors", "training_args.bin"], "adapter_model.safetensors"),
    (RANKS, PARTS_NAME),
    (["pytorch_model.bin", "training_args.bin"], "pytorch_model.bin"),
    (["adapter_model.bin", "optimizer.bin"], "adapter_model.bin"),
    (["pytorch_model.bin.index.json", *BINS], "pytorch_model.bin.index.json"),
    (["pytorch_model.fp16.bin.index.json", *BINS], "pytorch_model.fp16.bin.index.json"),
    (["pytorch_model.bin.index.json", *BINS, INDEX, *SHARDS], INDEX),
]
TOLD: list[tuple[list[str], str]] = [
    (SHARDS, "files of one model, and no model.safetensors.index.json"),
    (SHARDS[1:], "files of one model"),
    ([*RANKS, *SHARDS], "files of one model"),
    (["a.safetensors", "b.safetensors"], "'a.safetensors', 'b.safetensors': name one"),
    (["model.fp16.safetensors", "model.bf16.safetensors"], "name one, such as"),
    (["model.fp16.safetensors.index.json", *FP16, "x.safetensors"], "name one, such as"),
    (["x.metadata", "training_args.bin"], "no committed checkpoint"),
    ([INDEX, *SHARDS, *RANKS], f"holds '{INDEX}' and 2 files of ranks"),
]


def test_folder_means_the_file_that_hugging_face_s_loaders_take_or_says_what_it_holds() -> None:
    for names, meant in MEANT:
        for order in (names, names[::-1]):
            assert file_among(Path("/m"), order) == meant, names
    for names, text in TOLD:
        with pytest.raises(NotCommittedError) as raised:
            file_among(Path("/m"), names)
        assert text in str(raised.value), names


def test_names_of_files_and_indices_are_known() -> None:
    for name in ("x.safetensors", INDEX, "model.safetensors.index.fp16.json", "y.bin", "y.pth"):
        assert names_file(Path("/m", name))
    for name in ("config.json", "x.metadata", "model.index", "tokenizer.json"):
        assert not names_file(Path("/m", name))


def test_files_beside_a_model_hide_it_from_no_door(tmp_path: Path) -> None:
    st.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("model.safetensors.metadata", "._model.safetensors", "._.metadata"):
        (tmp_path / name).write_bytes(b"\0\5\26\7")
    assert list(dcpx.load_tensors(tmp_path)) == ["w"]
    assert dcpx.verify(tmp_path).ok
    dcpx.export(tmp_path, tmp_path / "out", no_dist=True)
    assert list(dcpx.load_tensors(tmp_path / "out")) == ["w"]


def test_index_of_bins_is_refused_with_a_way_that_works(tmp_path: Path) -> None:
    new, old = torch.ones(2), torch.zeros(2)
    torch.save({"a": new}, tmp_path / BINS[0])
    torch.save({"a": old, "b": new}, tmp_path / BINS[1])
    weight_map = {"a": BINS[0], "b": BINS[1]}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for path in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        for call in (dcpx.load_tensors, dcpx.verify):
            with pytest.raises(dcpx.UnsupportedError, match=r"dcpx\.export\(dict, FOLDER\)"):
                call(path)
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        found |= dcpx.load_tensors(
            tmp_path / file, [n for n, of in weight_map.items() if of == file]
        )
    dcpx.export(found, tmp_path / "out", no_dist=True)
    assert torch.equal(dcpx.load_tensors(tmp_path / "out")["a"], new)


def test_every_door_names_the_files_of_which_none_is_meant(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        st.save_file({"w": torch.ones(2)}, tmp_path / name)
    calls: list[Callable[[Path], Any]] = [
        dcpx.load_tensors, dcpx.verify, dcpx.inspect, dcpx.stats
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(NotCommittedError, match=r"holds 'a.safetensors', 'b"):
            call(tmp_path)
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 2 and "holds 'a.safetensors'" in result.output
