"""Errors that end with a way out: each is provoked, its text is followed, and the call works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hints import (
    arguments,
    assert_loads,
    run,
    save_models,
    save_state,
    text_of,
    zeros,
)
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
    RepairError,
    ShortReadError,
)

JARGON = re.compile(r"memo|opcode|\bSTOP\b|unpickle", re.IGNORECASE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_state(tmp_path)


# ---- No checkpoint, or a damaged one ------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return save_models(tmp_path)


@pytest.mark.parametrize("call", ["load", "load_pretrained", "export"])
def test_load_of_a_managers_root_names_the_checkpoints_beneath(root: Path, call: str) -> None:
    calls: dict[str, Callable[[Path], Any]] = {
        "load": lambda path: dcpx.load({"model": nn.Linear(2, 3).state_dict()}, path),
        "load_pretrained": lambda path: dcpx.load_pretrained(nn.Linear(2, 3), path),
        "export": lambda path: dcpx.export(path, root.parent / "artifact"),
    }
    text = text_of(NotCommittedError, lambda: calls[call](root))
    assert "'step-2', 'step-1'" in text
    assert "step-1" in run(text).output
    (first, *_) = re.findall(r"'(step-\d)'", text)
    calls[call](root / first)
    assert "CheckpointManager.resume takes the newest" in text
    assert CheckpointManager(root).resume(model=nn.Linear(2, 3)).tag == first


def test_mistyped_path_names_the_one_that_was_meant(saved: Path) -> None:
    text = text_of(NotCommittedError, lambda: dcpx.load(zeros(), saved.with_name("ckpt-1O")))
    (meant,) = re.findall(r"did you mean '([^']+)'\?", text)
    assert_loads(meant)


def test_missing_path_names_the_checkpoints_beside_it(saved: Path) -> None:
    text = text_of(NotCommittedError, lambda: dcpx.load(zeros(), saved.with_name("x")))
    assert "holds the checkpoint 'ckpt-10'" in text
    assert "ckpt-10" in run(text).output


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_file_of_a_checkpoint_names_its_directory(saved: Path, name: str) -> None:
    text = text_of(NotCommittedError, lambda: dcpx.load(zeros(), saved / name))
    (meant,) = re.findall(r"name its directory, '([^']+)'", text)
    assert_loads(meant)


def follow_repair(text: str) -> None:
    """Runs `dcpx repair`, and what it says in its turn."""
    refused = run(text, code=1)
    assert "nothing was written" in refused.output
    run(refused.output.replace("\n", " "))


def test_lost_metadata_names_repair_which_makes_it_anew(saved: Path) -> None:
    (saved / ".metadata").unlink()
    text = text_of(NotCommittedError, lambda: dcpx.load(zeros(), saved))
    assert "1 data file of an unfinished save" in text
    follow_repair(text)
    assert_loads(saved)


GARBAGE = [b"", b"hello, world " * 20, b"\x80\x04 this is no metadata", bytes(range(256)), b"\xd2"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_metadata_names_repair_in_plain_words(saved: Path, garbage: bytes) -> None:
    (saved / ".metadata").write_bytes(garbage)
    text = text_of(CorruptionError, lambda: dcpx.load(zeros(), saved))
    assert JARGON.search(text) is None
    follow_repair(text)
    assert_loads(saved)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_metadata_names_repair(saved: Path, damage: str) -> None:
    good = (saved / ".metadata").read_bytes()
    flipped = good[:30] + bytes([good[30] ^ 1]) + good[31:]
    (saved / ".metadata").write_bytes({"cut": good[:-10], "flipped": flipped}[damage])
    text = text_of(CorruptionError, lambda: dcpx.load(zeros(), saved))
    run(text) if damage == "flipped" else follow_repair(text)
    assert_loads(saved)


def test_repair_of_a_root_names_the_checkpoints_beneath(root: Path) -> None:
    text = text_of(RepairError, lambda: dcpx.repair(root))
    assert "step-1" in run(text).output


def test_flipped_bit_names_the_tensor_and_verify_which_finds_it(saved: Path) -> None:
    file = saved / "__0_0.distcp"
    change(file, read_footer(file).row("model.weight").payload_offset, b"\x01\x02")
    text = text_of(CorruptionError, lambda: dcpx.load(zeros(), saved))
    assert "'model.weight'" in text
    assert "model.weight" in run(text, code=1).output


def test_missing_data_file_names_verify_which_lists_it(saved: Path) -> None:
    (saved / "__0_0.distcp").unlink()
    text = text_of(DcpxError, lambda: dcpx.load(zeros(), saved))
    assert "__0_0.distcp" in run(text, code=1).output


def test_cut_data_file_names_verify_which_finds_it(saved: Path) -> None:
    with (saved / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)
    text = text_of(ShortReadError, lambda: dcpx.load(zeros(), saved))
    assert "__0_0.distcp" in run(text, code=1).output


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
    given = eval(target, {"state_dict": wanted})
    assert dcpx.load(given, tmp_path / "ckpt").is_whole
    (tensor,) = dcpx_tensors(wanted)
    assert torch.equal(tensor, torch.ones(2))


def dcpx_tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for value in tree.values() for tensor in dcpx_tensors(value)]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "a.module."])
@pytest.mark.parametrize("is_stored", [True, False])
def test_wrapped_names_are_told_of_a_key_map_that_finds_them(
    tmp_path: Path, prefix: str, is_stored: bool
) -> None:
    bare = prefix.replace("module.", "").replace("_orig_mod.", "")
    names = (f"{prefix}w", f"{bare}w")
    stored, wanted = names if is_stored else names[::-1]
    dcpx.save({stored: torch.ones(2)}, tmp_path / "ckpt")
    target = {wanted: torch.zeros(2)}
    text = text_of(MismatchError, lambda: dcpx.load(target, tmp_path / "ckpt"))
    assert "1 of them is stored under a name with other wrappers" in text
    assert "load(" not in text
    dcpx.load(target, tmp_path / "ckpt", key_map=arguments(text)["key_map"])
    assert torch.equal(target[wanted], torch.ones(2))


def test_key_map_is_not_offered_where_it_was_given_or_finds_nothing(tmp_path: Path) -> None:
    dcpx.save({"module.a.w": torch.ones(2), "a.module.w": torch.ones(2)}, tmp_path / "ckpt")
    target = {"a.w": torch.zeros(2)}
    for more in ({}, {"key_map": KeyMap()}):
        text = text_of(
            MismatchError, lambda more=more: dcpx.load(target, tmp_path / "ckpt", **more)
        )
        assert "KeyMap" not in text
    model = nn.Sequential(nn.Linear(2, 2))
    assert "KeyMap" not in text_of(
        MismatchError, lambda: dcpx.load_pretrained(model, tmp_path / "ckpt")
    )


def test_missing_names_and_other_dtypes_name_the_arguments_that_allow_them(saved: Path) -> None:
    target = zeros()
    target["model"] |= {"extra": torch.zeros(1), "bias": torch.zeros(2, dtype=torch.float64)}
    text = text_of(MismatchError, lambda: dcpx.load(target, saved))
    assert ": 1 name is missing, 1 dtype differs; nothing was read" in text
    found = arguments(text)
    assert set(found) == {"strict", "cast"}
    assert "allow_missing=[globs]" in text
    assert dcpx.load(target, saved, **found).missing == ("model.extra",)
    allowed = {"allow_missing": ["*.extra"], "cast": found["cast"]}
    assert dcpx.load(target, saved, **allowed).missing == ("model.extra",)


def test_counts_of_several_read_as_english(saved: Path) -> None:
    target = {"model": {"a": torch.zeros(1), "b": torch.zeros(1), "weight": torch.zeros(1)}}
    target["model"]["bias"] = torch.zeros(3)
    text = text_of(MismatchError, lambda: dcpx.load(target, saved))
    assert ": 2 names are missing, 2 shapes differ; nothing was read" in text
