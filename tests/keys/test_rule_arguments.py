"""Rules that are given wrong numbers, merges of which a part is not stored, and parts without
elements, which keep the dtype of what is stored.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as st
import torch

import torch_dcpx as dcpx
from torch_dcpx import KeyMap, Merge, OptionError, PlanError, Split, Transpose

EXPERTS = Merge((r"(.*)\.experts\.(\d+)\.w",), r"\1.experts.w", stack=True)


def experts(*numbers: int, layer: int = 0) -> dict[str, tuple[int, ...]]:
    return {f"{layer}.experts.{number}.w": (2, 3) for number in numbers}


@pytest.mark.parametrize("is_names", [False, True])
def test_merge_of_numbers_with_a_gap_names_the_first_that_is_not_stored(is_names: bool) -> None:
    sizes = experts(0, 1, 2, 3) | experts(0, 1, 3, 11, layer=1)
    text = "'1.experts.w' is merged of .* from 0 to 11 nothing is stored for 2;"
    with pytest.raises(PlanError, match=text) as raised:
        KeyMap(EXPERTS).dry_run(list(sizes) if is_names else sizes)
    assert raised.value.fqn == "1.experts.w"


def test_merge_with_a_gap_is_refused_before_anything_is_read_or_written(tmp_path: Path) -> None:
    state = {name: torch.ones(sizes) for name, sizes in experts(0, 1, 3).items()}
    dcpx.save(dict(state), tmp_path / "ckpt")
    target = {"0.experts.w": torch.zeros(3, 2, 3)}
    with pytest.raises(PlanError, match="nothing is stored for 2"):
        dcpx.load(target, tmp_path / "ckpt", key_map=KeyMap(EXPERTS))
    assert not target["0.experts.w"].any()
    with pytest.raises(PlanError, match="nothing is stored for 2"):
        dcpx.export(state, tmp_path / "out", key_map=KeyMap(EXPERTS))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("merge", "names"),
    [
        (EXPERTS, [*experts(4, 5, 6), *experts(7, 8, layer=1)]),
        (Merge((r"w\.(\d+)\.(\d+)",), "w"), ["w.0.0", "w.0.1", "w.1.2", "w.1.3"]),
        (Merge((r"w\.(\d+)", r"v\.(\d+)"), "w"), ["w.0", "w.1", "v.1", "v.2", "v.3"]),
        (Merge((r"w\.(\d+)(\.b)?",), "w"), ["w.0", "w.1.b", "w.2"]),
        (Merge((r"w\.(1)", r"w\.(3)"), "w"), ["w.1", "w.3"]),
        (Merge((r"mlp\.w([13])",), "mlp.w13"), ["mlp.w1", "mlp.w3"]),  # w2 is another's
        (Merge((r"w\.(8|16|4096)",), "w"), ["w.8", "w.16", "w.4096"]),
        (Merge((r"e\.(\d?[02468])",), "e"), ["e.0", "e.2", "e.4"]),
        (Merge((r"e\.(?!3$)(\d+)",), "e"), ["e.2", "e.4"]),
    ],
)
def test_merge_of_numbers_that_run_on_takes_all_of_them(merge: Any, names: list[str]) -> None:
    rows = KeyMap(merge).dry_run(names).rows
    assert sorted(name for old, _ in rows for name in old) == sorted(names)


@pytest.mark.parametrize(
    ("rule", "names", "text"),
    [
        (r"w\.(\d+)", ["w.00", "w.01", "w.03"], "nothing is stored for 2;"),
        (r"w\.(\d+)", ["w.0", "w.1", "w.123456789"], "nothing is stored for 2;"),
        (r"w\.(\d+)\.(\d+)", ["w.0.0", "w.2.0"], r"'w\\.(\\d+)\\.(\\d+)'"),
        (r"w\.(\d+)\.(\d+)", ["w.0.0", "w.0.2", "w.1.1"], r"'w\\.(\\d+)\\.(\\d+)'"),
    ],
)
def test_gap_is_found_in_any_group_behind_zeros_and_however_wide_it_is(
    rule: str, names: list[str], text: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        KeyMap(Merge((rule,), "w")).resolve(dict.fromkeys(names, (2,)))


@pytest.mark.parametrize(
    "sizes", [("a", 4), (2.0, 2.0), (True, 3), (-1, 5), (None, 4), "22", 4, torch.tensor([0.5, 1])]
)
def test_sizes_of_a_split_that_are_no_counts_are_refused_when_the_map_is_made(sizes: Any) -> None:
    with pytest.raises(OptionError, match="sizes of a Split are a list of ints from 0 on, got"):
        KeyMap(Split("q", ("x", "y"), sizes=sizes))


def test_sizes_of_a_split_are_any_integers() -> None:
    for sizes in ((1, 3), [1, 3], torch.Size([1, 3]), torch.tensor([1, 3])):
        entries = KeyMap(Split("q", ("x", "y"), sizes=sizes)).resolve({"q": (4, 3)})
        assert [entry.sizes for entry in entries.values()] == [(1, 3), (3, 3)]


# ---- Parts without elements ----------------------------------------------------------------------

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
