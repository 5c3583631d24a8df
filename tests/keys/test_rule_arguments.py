"""Rules that are given wrong numbers, and merges of which a part is not stored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dcpx as dcpx
from torch_dcpx import KeyMap, Merge, OptionError, PlanError, Split

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


@pytest.mark.parametrize("names", [["w.00", "w.01", "w.03"], ["w.0", "w.1", "w.123456789"]])
def test_gap_is_found_behind_zeros_and_however_wide_it_is(names: list[str]) -> None:
    with pytest.raises(PlanError, match="nothing is stored for 2;"):
        KeyMap(Merge((r"w\.(\d+)",), "w")).resolve(dict.fromkeys(names, (2,)))


@pytest.mark.parametrize("names", [["w.0.0", "w.2.0"], ["w.0.0", "w.0.2", "w.1.1"]])
def test_gap_in_any_group_is_found(names: list[str]) -> None:
    with pytest.raises(PlanError, match=re.escape(r"'w\\.(\\d+)\\.(\\d+)'")):
        KeyMap(Merge((r"w\.(\d+)\.(\d+)",), "w")).resolve(dict.fromkeys(names, (2,)))


@pytest.mark.parametrize(
    "sizes", [("a", 4), (2.0, 2.0), (True, 3), (-1, 5), (None, 4), "22", 4, torch.tensor([0.5, 1])]
)
def test_sizes_of_a_split_that_are_no_counts_are_refused_when_the_map_is_made(sizes: Any) -> None:
    with pytest.raises(OptionError, match="sizes of a Split are a list of ints from 0 on, got"):
        KeyMap(Split("q", ("x", "y"), sizes=sizes))


@pytest.mark.parametrize("sizes", [(1, 3), [1, 3], torch.Size([1, 3]), torch.tensor([1, 3])])
def test_sizes_of_a_split_are_any_integers(sizes: Any) -> None:
    entries = KeyMap(Split("q", ("x", "y"), sizes=sizes)).resolve({"q": (4, 3)})
    assert [entry.sizes for entry in entries.values()] == [(1, 3), (3, 3)]
