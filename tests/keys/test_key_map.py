"""KeyMap: names, shapes and bytes against dense tensors."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine import points

import torch_dcpx as dcpx
from torch_dcpx import _C, KeyMap, Merge, OptionError, PlanError, Split, Transpose
from torch_dcpx.keys import mapped_state


def random_case(rng: random.Random) -> tuple[dict[str, torch.Tensor], list[Any], dict[str, Any]]:
    """Returns stored tensors, rules, and by new name the tensor that is to be loaded."""
    state = {f"layer.{i}.w": _random_tensor(rng, (4 * rng.randint(1, 3), 6)) for i in range(3)}
    dense, rules = dict(state), []
    for step in range(rng.randint(1, 5)):
        kind = rng.choice(["split", "squeeze", "merge", "stack", "transpose", "rename"])
        name = rng.choice(sorted(dense))
        tensor = dense[name]
        if kind in ("split", "squeeze") and tensor.dim() > 1:
            dim = rng.randrange(-tensor.dim(), tensor.dim())
            if kind == "squeeze":
                sizes = [1] * tensor.shape[dim]
            else:
                cut = rng.randint(0, tensor.shape[dim])
                sizes = [cut, tensor.shape[dim] - cut]
            into = [f"s{step}.{i}" for i in range(len(sizes))]
            parts = tensor.split(sizes, dim)
            del dense[name]
            if kind == "squeeze":
                parts = [part.squeeze(dim) for part in parts]
            dense |= dict(zip(into, parts, strict=True))
            rules.append(Split(re.escape(name), into, dim, sizes, kind == "squeeze"))
        elif kind in ("merge", "stack"):
            alike = [one for one in sorted(dense) if dense[one].shape == tensor.shape]
            dim = rng.randrange(max(1, tensor.dim()))
            join = torch.stack if kind == "stack" else torch.cat
            dense[f"m{step}"] = join([dense.pop(one) for one in alike], dim)
            rules.append(Merge(list(map(re.escape, alike)), f"m{step}", dim, kind == "stack"))
        elif kind == "transpose" and tensor.dim() > 1:
            dims = tuple(rng.sample(range(tensor.dim()), 2))
            dense[name] = tensor.transpose(*dims)
            rules.append(Transpose(re.escape(name), dims))
        else:
            dense[f"r{step}"] = dense.pop(name)
            rules.append({name: f"r{step}"})
    return state, rules, dense


def _random_tensor(rng: random.Random, sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))


def test_load_through_any_rules_equals_the_dense_operations(tmp_path: Path, seed: int) -> None:
    for number in range(12):
        state, rules, dense = random_case(random.Random(seed * 100 + number))
        dcpx.save(state, tmp_path / str(number))
        target = {name: torch.full_like(tensor, -1) for name, tensor in dense.items()}
        report = dcpx.load(target, tmp_path / str(number), key_map=KeyMap(*rules))
        for name, tensor in dense.items():
            assert torch.equal(target[name], tensor), (number, name, rules)
        assert report.unexpected == ()
        assert report.read is not None and report.read.needed_bytes == report.nbytes
        assert report.nbytes == sum(tensor.numel() * 4 for tensor in dense.values())


def test_any_part_of_a_mapped_tensor_is_found_in_both_directions(seed: int) -> None:
    for number in range(points(200)):
        rng = random.Random(seed * 1000 + number)
        state, rules, dense = random_case(rng)
        entries = KeyMap(*rules).resolve({name: tuple(t.shape) for name, t in state.items()})
        assert entries.keys() == dense.keys()
        for name, entry in entries.items():
            whole = dense[name]
            begins = [rng.randint(0, size) for size in whole.shape]
            ends = [rng.randint(b, size) for b, size in zip(begins, whole.shape, strict=True)]
            box = tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))
            target = torch.zeros_like(whole[box])
            for part in entry.parts_of(begins, target):
                stored = tuple(
                    slice(o, o + n) for o, n in zip(part.offsets, part.lengths, strict=True)
                )
                part.view.copy_(state[part.fqn][stored])
            assert torch.equal(target, whole[box])
            rebuilt = torch.zeros_like(whole)
            for source in entry.sources:
                half = state[source].shape[0] // 2
                for begin, chunk in ((0, state[source][:half]), (half, state[source][half:])):
                    offsets = (begin, *[0] * (chunk.dim() - 1))
                    for at, view in entry.boxes_of(source, offsets, chunk):
                        where = tuple(slice(o, o + n) for o, n in zip(at, view.shape, strict=True))
                        rebuilt[where] = view
            assert torch.equal(rebuilt, whole)


def test_wrappers_are_left_out_on_both_sides_unless_told_otherwise(tmp_path: Path) -> None:
    stored = {"module.a._orig_mod.w": torch.arange(4), "b.w": torch.arange(3), "module.b.w": 5}
    dcpx.save(stored, tmp_path)
    target = {"a.module.w": torch.zeros(4, dtype=torch.int64), "b.w": torch.zeros(3, dtype=int)}
    with pytest.raises(dcpx.MismatchError, match=r"a\.module\.w"):
        dcpx.load(dict(target), tmp_path)
    with pytest.raises(dcpx.MismatchError, match=r"a\.module\.w"):
        dcpx.load(dict(target), tmp_path, key_map=KeyMap(wrappers=False))
    dcpx.load(target, tmp_path, key_map=KeyMap())
    assert torch.equal(target["a.module.w"], torch.arange(4))
    assert torch.equal(target["b.w"], torch.arange(3))


def test_two_names_of_the_state_for_one_entry_are_refused(tmp_path: Path) -> None:
    dcpx.save({"a.w": torch.arange(4)}, tmp_path)
    target = {"module.a.w": torch.zeros(4), "a.module.w": torch.zeros(4)}
    for wrappers in (None, True, False):
        with pytest.raises(dcpx.MismatchError) as raised:
            dcpx.load(target, tmp_path, key_map=KeyMap(wrappers=wrappers))
        assert set(raised.value.missing) == target.keys()


def test_objects_are_renamed_in_nested_states(tmp_path: Path) -> None:
    dcpx.save({"old": {"step": 7, "lr": [1.0, 2.0]}, "w": torch.arange(2)}, tmp_path)
    target = {"new": {"n": 0, "lr": [0.0, 0.0]}, "w": torch.zeros(2, dtype=torch.int64)}
    dcpx.load(target, tmp_path, key_map=KeyMap((r"^old\.", "new."), {"new.step": "new.n"}))
    assert target["new"] == {"n": 7, "lr": [1.0, 2.0]}
    assert torch.equal(target["w"], torch.arange(2))


STORED = {"a": (4, 2), "b": (4, 2), "step": None}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"a": "b"}, "'b' and 'a' both become 'b' by rule 0|'a' and 'b' both become 'b'"),
        (lambda _: "x", "'a' and 'b' both become 'x'"),
        ({"none": "b"}, "rule 0 of the KeyMap, dict, matches no stored name: 'none'"),
        ({"a": "x", "none": "y"}, "dict, matches no stored name: 'none'"),
        (("none", "b"), "matches no stored name: 'none'"),
        (Split("none", ["x", "y"]), "Split, matches no stored name"),
        (Transpose("none"), "Transpose, matches no stored name"),
        (Merge(["a", "none"], "x"), "'x' is merged of 2 parts, and nothing is stored for 'none'"),
        (Split("a", ["x", "y", "z"]), r"'a' of sizes \[4, 2\] cannot be split along dimension 0"),
        (Split("a", ["x"], dim=7), "'a' has 2 dimensions, none is number 7"),
        (Split("step", ["x", "y"]), "'step' is an object, which nobody can split"),
        (lambda _: 5, "makes 5 of 'a'"),
        (Merge(["a", "wide"], "x"), r"'x' cannot be merged .* 0: .*\(4, 2\), \(4, 3\)"),
        (Merge(["wide", "a"], "x", 1), None),
        (Merge(["a", "tall"], "x", 1), "'x' cannot be merged along dimension 1"),
        (Merge(["a", "flat"], "x"), "'x' cannot be merged along dimension 0"),
    ],
)
def test_rules_that_do_not_fit_are_refused_by_name(rule: Any, text: str | None) -> None:
    stored = {**STORED, "wide": (4, 3), "tall": (5, 2), "flat": (4,)}
    with pytest.raises(PlanError, match=text) if text else contextlib.nullcontext():
        KeyMap(rule).resolve(stored)


def test_what_is_no_rule_is_an_option_error() -> None:
    for rule in (("(", "x"), Split("(", ["x"]), 5, Merge(["a", "("], "x")):
        with pytest.raises(OptionError):
            KeyMap(rule)  # type: ignore[arg-type]


def test_dry_run_shows_old_and_new_names_by_path_names_and_sizes(tmp_path: Path) -> None:
    dcpx.save({"qkv": torch.zeros(6, 2), "a": torch.zeros(2), "junk": 1}, tmp_path)
    rules = KeyMap(Split("qkv", ["q", "k", "v"]), {"a": "b", "junk": None})
    shown = "qkv -> q\nqkv -> k\nqkv -> v\na -> b\njunk -> (left out)"
    assert set(str(rules.dry_run(tmp_path)).splitlines()) == set(shown.splitlines())
    assert str(rules.dry_run(["qkv", "a", "junk"])) == shown
    assert str(rules.dry_run({"qkv": (6, 2), "a": (2,), "junk": None})) == shown
    with pytest.raises(PlanError, match="cannot be split"):
        rules.dry_run({"qkv": (5, 2), "a": (2,), "junk": None})


def test_differences_through_a_map_are_told_before_anything_is_read(tmp_path: Path) -> None:
    dcpx.save({"qkv": torch.ones(6, 2), "a": torch.ones(2)}, tmp_path)
    rules = KeyMap(Split("qkv", ["q", "k", "v"]))
    target = {"q": torch.zeros(3, 2), "k": torch.zeros(2, 2).half(), "none": torch.zeros(1)}
    with pytest.raises(dcpx.MismatchError) as raised:
        dcpx.load(target, tmp_path, key_map=rules)
    assert raised.value.missing == ("none",)
    assert raised.value.shapes == (("q", (2, 2), (3, 2)),)
    assert raised.value.dtypes == (("qkv", "float32", "float16"),)
    assert not target["k"].any()


def test_identity_costs_no_other_call_and_no_other_byte(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(64, 8) for i in range(50)}
    dcpx.save(state, tmp_path)
    counts = []
    for key_map in (None, KeyMap()):
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        before = _C.call_counts()
        report = dcpx.load(target, tmp_path, key_map=key_map)
        calls = {name: n - before.get(name, 0) for name, n in _C.call_counts().items()}
        assert report.read is not None
        counts.append((calls, report.read.needed_bytes, report.read.read_bytes))
        assert all(torch.equal(target[name], tensor) for name, tensor in state.items())
    assert counts[0] == counts[1]


def test_names_that_stay_as_they_are_are_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcpx.save({"a": torch.arange(3), "b": 7}, tmp_path / "plain")
    dcpx.save({"module.a": torch.arange(3)}, tmp_path / "wrapped")
    asked: list[KeyMap] = []
    real = mapped_state.readings

    def readings(key_map: KeyMap, *args: Any, **kwargs: Any) -> Any:
        asked.append(key_map)
        return real(key_map, *args, **kwargs)

    monkeypatch.setattr(mapped_state, "readings", readings)
    for key_map in (KeyMap(), KeyMap(wrappers=False)):
        target = {"a": torch.zeros(3, dtype=torch.int64), "b": 0}
        dcpx.load(target, tmp_path / "plain", key_map=key_map)
        assert target["b"] == 7 and target["a"].tolist() == [0, 1, 2]
    assert not asked
    maps = [KeyMap(), KeyMap({"module.a": "a"}, wrappers=False)]
    for key_map in maps:
        target = {"a": torch.zeros(3, dtype=torch.int64)}
        dcpx.load(target, tmp_path / "wrapped", key_map=key_map)
        assert target["a"].tolist() == [0, 1, 2]
    assert asked == maps
    with pytest.raises(PlanError, match="matches no stored name"):
        dcpx.load({"a": torch.zeros(3)}, tmp_path / "plain", key_map=KeyMap(("^x", "")))
    with pytest.raises(dcpx.MismatchError, match="'c'"):
        dcpx.load({"c": torch.zeros(3)}, tmp_path / "plain", key_map=KeyMap())


def test_planner_that_cannot_map_is_refused(tmp_path: Path) -> None:
    dcpx.save({"w": torch.ones(2)}, tmp_path)
    planner = dcpx.DcpxLoadPlanner(flatten_state_dict=False)
    with pytest.raises(OptionError, match="key_map needs a DcpxLoadPlanner"):
        dcpx.load({"w": torch.ones(2)}, tmp_path, planner=planner, key_map=KeyMap())
    with pytest.raises(OptionError, match="key_map must be a KeyMap"):
        dcpx.load({"w": torch.ones(2)}, tmp_path, key_map={"a": "b"})  # type: ignore[arg-type]


def test_planner_that_mapped_once_plans_without_a_map_again(tmp_path: Path) -> None:
    dcpx.save({"a": torch.ones(3)}, tmp_path)
    planner = dcpx.DcpxLoadPlanner()
    dcpx.load({"b": torch.zeros(3)}, tmp_path, planner=planner, key_map=KeyMap({"a": "b"}))
    assert planner.dcpx_is_mapped
    dcpx.load({"a": torch.zeros(3)}, tmp_path, planner=planner)
    assert not planner.dcpx_is_mapped


@pytest.mark.parametrize(
    "rule",
    [
        ("a(b)", r"\2"), ("a", None), Split("ab", "cd"), Split("ab", [r"\3", "b"]),
        Split("ab", ["c", "b"], dim="x"), Merge(["ab"], r"\4"), Merge(["ab"], None),
        Transpose("ab", 3), Transpose("ab", (0,)),
    ],
)  # fmt: skip
def test_rule_that_could_never_work_is_refused_when_the_map_is_made(rule: Any) -> None:
    with pytest.raises(OptionError, match=r"^(dimensions|.* is no text)"):
        KeyMap(rule)
    groups = (r"^(a)|b(?P<x>c)?", r"\g<1>\g<x>")
    KeyMap(groups, ("(?i)A", ""), Merge("(a)", r"\1"), Split("a", ()))
