"""The page of `inspect` shows values of small objects: which ones, how short, whatever they are."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import dcpx, scripts_of
from support.saves import WRITERS, data_files, save, save_rank_local

import torch_dcpx
from torch_dcpx.cli.page_values import short_text


class OfUser:
    """A class that no reader makes."""


def drawn(path: Path, *args: object) -> list[dict[str, Any]]:
    """Returns the checkpoints of the page of `inspect path`."""
    out = path.parent / "out.html"
    out.unlink(missing_ok=True)
    dcpx("inspect", path, "--html", out, *args)
    found: list[dict[str, Any]] = scripts_of(out)[0]["checkpoints"]
    return found


def values_of(one: dict[str, Any]) -> dict[str, str]:
    pairs = zip(one["values"]["item"], one["values"]["text"], strict=True)
    return {one["items"]["name"][item]: text for item, text in pairs}


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_values_of_small_objects_and_tensors_are_in_the_page(tmp_path: Path, writer: str) -> None:
    state = {
        "lr": 0.001, "name": "adam", "betas": (0.9, 0.999), "step": 7, "large": list(range(9000)),
        "scalar": torch.tensor(3.5), "few": torch.arange(16), "many": torch.arange(17),
    }  # fmt: skip
    save(state, tmp_path / "a", writer)
    (one,) = drawn(tmp_path / "a")
    found = values_of(one)
    assert found.pop("betas", "(0.9, 0.999)") == "(0.9, 0.999)"  # stock cuts it in two names
    assert {name: text for name, text in found.items() if not name.startswith("betas")} == {
        "lr": "0.001", "name": "'adam'", "step": "7", "scalar": "3.5", "few": str([*range(16)]),
    }  # fmt: skip


def test_values_keep_to_the_keys(tmp_path: Path) -> None:
    save({"a": 1, "b": 2}, tmp_path / "step-120")
    (one,) = drawn(tmp_path / "step-120", "-k", "b")
    assert (values_of(one), one["step"]) == ({"b": "2"}, 120)


def test_head_is_that_of_inspect(tmp_path: Path) -> None:
    with torch_dcpx.CheckpointManager(tmp_path) as manager:
        manager.save("best", model=torch.nn.Linear(2, 2), step=31)
    (one,) = drawn(tmp_path / "best")
    found = torch_dcpx.inspect(tmp_path / "best")
    head = found.step, found.saved_at, found.parameters
    assert (one["step"], one["saved"], one["parameters"]) == head == (31, found.saved_at, 6)


def test_each_rank_of_a_rank_local_checkpoint_has_its_own_values(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local({"seed": 40 + rank}, tmp_path / "a", rank)
    assert [values_of(one) for one in drawn(tmp_path / "a")] == [{"seed": "40"}, {"seed": "41"}]


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_values_of_an_export_are_in_the_page(tmp_path: Path, name: str) -> None:
    torch_dcpx.export({"w": torch.tensor(2.0)}, tmp_path / name)
    (one,) = drawn(tmp_path / name)
    assert values_of(one) == {"w": "2.0"}


def test_one_object_that_no_reader_makes_hides_no_other(tmp_path: Path) -> None:
    state = {**{f"n{at}": at for at in range(20)}, "user": OfUser()}
    save(state, tmp_path / "a")
    (one,) = drawn(tmp_path / "a")
    found = values_of(one)
    assert found.pop("user") == "not read: UnsafePickleError"
    assert found == {f"n{at}": str(at) for at in range(20)}


def test_page_of_a_checkpoint_without_its_file_says_so_of_each_value(tmp_path: Path) -> None:
    save({f"n{at}": at for at in range(500)}, tmp_path / "a")
    (file,) = data_files(tmp_path / "a")
    os.unlink(tmp_path / "a" / file)
    (one,) = drawn(tmp_path / "a")
    texts = set(values_of(one).values())
    assert len(values_of(one)) == 64 and all(text.startswith("not read") for text in texts)
    assert one["faults"]


def test_a_page_has_few_values_however_many_there_are(tmp_path: Path) -> None:
    state = {f"o{at}": at for at in range(300)} | {f"t{at}": torch.ones(()) for at in range(300)}
    save(state, tmp_path / "a")
    (one,) = drawn(tmp_path / "a")
    found = values_of(one)
    assert len(found) == 128


def nested(depth: int) -> list[Any]:
    """A list of ten times the same list, and so on: 10 ** depth entries when it is written out."""
    found: list[Any] = [1] * 10
    for _ in range(depth):
        found = [found] * 10
    return found


ODD: dict[str, Any] = {
    "exponential": nested(40), "long": "x" * 5000, "huge": 1 << 5000, "nan": float("nan"),
    "many": {f"k{at}": nested(3) for at in range(99)}, "expanded": torch.zeros(1).expand(1 << 40),
    "sparse": torch.ones(3).to_sparse(), "escapes": OrderedDict(a="\x1b[2J\u202e"),
    "class": OfUser, "set": {1, 2}, "bytes": b"\0" * 999, "surrogate": "\ud800",
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_text_of_a_value_is_short_and_printable(what: str) -> None:
    text = short_text(ODD[what])
    assert 0 < len(text) <= 200 and text.isprintable(), text


def test_a_list_in_itself_ends() -> None:
    one: list[Any] = [1]
    one.append(one)
    assert short_text(one) == "[1, [1, [1, [...]]]]"
