"""Parts without elements: they keep the dtype of what is stored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch

import torch_dcpx as dcpx
from torch_dcpx import KeyMap, Merge, PlanError, Split, Transpose

STORED = {"q": torch.arange(12).view(4, 3).bfloat16(), "e": torch.zeros(0, 3).bfloat16()}
NAMES = KeyMap(Split("q", ("x", "y"), sizes=(0, 4)), Split("e", ("f", "g"), sizes=(0, 0)))


def wanted(**others: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns tensors to load into, of bfloat16 but for `others`."""
    sizes = {"x": (0, 3), "y": (4, 3), "f": (0, 3), "g": (0, 3)}
    return {
        name: torch.full(shape, -1, dtype=others.get(name, torch.bfloat16))
        for name, shape in sizes.items()
    }


@pytest.mark.parametrize("is_stored", [False, True])
def test_empty_part_has_the_stored_dtype_in_an_artifact(tmp_path: Path, is_stored: bool) -> None:
    dcpx.save(dict(STORED), tmp_path / "ckpt")
    source: Any = tmp_path / "ckpt" if is_stored else STORED
    for file_format in ("safetensors", "torch"):
        dcpx.export(source, tmp_path / file_format, key_map=NAMES, format=file_format)
    held = st.load_file(tmp_path / "safetensors" / "model.safetensors")
    archive = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    for found in (held, archive):
        assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
            name: (t.dtype, t.shape) for name, t in wanted().items()
        }
        assert torch.equal(found["y"], STORED["q"])


@pytest.mark.parametrize("name", ["x", "f", "g"])
def test_empty_part_of_another_dtype_is_refused_unless_casts_are_allowed(
    tmp_path: Path, name: str
) -> None:
    dcpx.save(dict(STORED), tmp_path)
    target = wanted(**{name: torch.float32})
    with pytest.raises(dcpx.MismatchError, match="stored bfloat16, wanted float32"):
        dcpx.load(target, tmp_path, key_map=NAMES)
    assert (target["y"] == -1).all()
    report = dcpx.load(target, tmp_path, key_map=NAMES, cast="allow")
    assert [row[1:] for row in report.casts] == [("bfloat16", "float32")]
    assert torch.equal(target["y"], STORED["q"])
    report = dcpx.load(wanted(), tmp_path, key_map=NAMES)
    assert report.is_whole and report.unexpected == ()


def test_empty_part_is_split_again_and_errors_name_its_source() -> None:
    sizes = {"q": (4, 3)}
    first = Split("q", ("x", "y"), sizes=(0, 4))
    entries = KeyMap(first, Split("x", ("v", "w"), dim=1, sizes=(1, 2))).resolve(sizes)
    assert {name: entry.sizes for name, entry in entries.items()} == {
        "v": (0, 1), "w": (0, 2), "y": (4, 3),
    }  # fmt: skip
    assert {entry.sources for entry in entries.values()} == {("q",)}
    with pytest.raises(PlanError, match="'q' has 2 dimensions, none is number 5"):
        KeyMap(first, Split("x", ("v", "w"), dim=5)).resolve(sizes)


def test_merge_of_parts_of_which_some_are_empty_is_the_dense_one(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    dense = torch.arange(24).view(4, 6)
    dcpx.save({"a": dense}, tmp_path)
    cuts = sorted(rng.choice([0, 0, 4, rng.randint(0, 4)]) for _ in range(3))
    ends = [*cuts, 4]
    sizes = [end - begin for begin, end in zip([0, *cuts], ends, strict=True)]
    into = [f"p{i}" for i in range(4)]
    order = rng.sample(into, 4)
    rules = KeyMap(Split("a", into, sizes=sizes), Merge(order, "m"), Transpose("m"))
    target = {"m": torch.zeros(6, 4, dtype=torch.int64)}
    dcpx.load(target, tmp_path, key_map=rules)
    parts = dict(zip(into, dense.split(sizes), strict=True))
    assert torch.equal(target["m"], torch.cat([parts[name] for name in order]).T)


def test_name_of_an_empty_part_keeps_the_optimizer_with_the_rest(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({"q": torch.ones(4, 3)})
    optimizer = torch.optim.Adam(model.parameters())
    model["q"].sum().backward()
    optimizer.step()
    manager = dcpx.CheckpointManager(tmp_path)
    manager.save(1, model=model, optimizer=optimizer).result()
    new = torch.nn.ParameterDict({"y": torch.zeros(4, 3)})
    new_optimizer = torch.optim.Adam(new.parameters())
    rules = KeyMap(Split("q", ("x", "y"), sizes=(0, 4)))
    manager.resume(model=new, optimizer=new_optimizer, translate=rules)
    assert torch.equal(new["y"], model["q"])
    assert new_optimizer.state[new["y"]]["step"] == 1
