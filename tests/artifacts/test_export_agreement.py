"""Ranks that ask for different exports: refused on all of them, before a file is made."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import assert_artifact, read_artifact
from support.chunked import chunked, grid
from support.machine import seconds
from support.store_ranks import Ranks
from torch.distributed import HashStore

import torch_dcpx as dcpx
from torch_dcpx import KeyMap, Merge, Split, WriteOptions
from torch_dcpx.artifacts import export as export_artifact
from torch_dcpx.artifacts.agreement import RankPart, check_same_tensors
from torch_dcpx.artifacts.layout import ExportTensor
from torch_dcpx.artifacts.sources import Offer
from torch_dcpx.artifacts.stored_source import StoredSource

WHOLE = {name: torch.full((6, 5), float(n)) for n, name in enumerate("abcd")}


class Exports:
    """Ranks as threads, each of which calls `dcpx.export` with arguments of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks = Ranks(HashStore(), 2, timeout_s=seconds(30))
        rank = threading.local()

        def exchange_for(*_: Any) -> Any:
            return self.ranks.exchange(rank.number)

        def export(number: int, source: Any, path: Any, arguments: dict[str, Any]) -> Any:
            rank.number = number
            return dcpx.export(source, path, **arguments)

        monkeypatch.setattr(export_artifact, "exchange_for", exchange_for)
        self._export = export

    def __call__(
        self, sources: Any, paths: Any, first: dict[str, Any], second: dict[str, Any]
    ) -> list[Any]:
        """Returns by rank what its call returned or raised."""
        arguments = (first, second)
        return self.ranks.run(lambda n: self._export(n, sources[n], paths[n], arguments[n]))


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exports]:
    made = Exports(monkeypatch)
    yield made
    made.ranks.close()


def halves(whole: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns by rank a state that holds its half of each tensor's rows."""
    states: list[dict[str, torch.Tensor]] = [{}, {}]
    for name, tensor in whole.items():
        for state, box in zip(states, grid(tensor.shape, (2, 1)), strict=True):
            state[name] = chunked([box], [tensor[box.slices]], tensor.shape)
    return states


def same_source(kind: str, path: Path) -> list[Any]:
    """Returns by rank the halves of WHOLE, or one checkpoint."""
    if kind == "state":
        return halves(WHOLE)
    dcpx.save(WHOLE, path / "ckpt")
    return [path / "ckpt"] * 2


def assert_refused(results: list[Any], *words: str) -> None:
    """Fails unless both ranks raised a PlanError with these words."""
    for result in results:
        assert isinstance(result, dcpx.PlanError), result
        assert all(word in str(result) for word in words), str(result)


GLOBS = [f"[a-d]*{'?' * n}" for n in range(200)]
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"keys": ["a"]}, {"keys": ["b"]}, ["keys=['b'] where rank 0 has ['a']"]),
    ({}, {"keys": ["b"]}, ["keys=['b'] where rank 0 has None"]),
    ({"keys": [*GLOBS, "y"]}, {"keys": [*GLOBS, "z"]}, ["keys=...", "201 globs ("]),
    ({}, {"format": "torch"}, ["format='torch' where rank 0 has 'safetensors'"]),
    ({}, {"max_shard_bytes": "1GB"}, ["max_shard_bytes=1000000000 where", "5000000000"]),
    ({}, {"dtype": torch.bfloat16}, ["dtype='bfloat16' where rank 0 has None"]),
    ({"metadata": {"a": "b"}}, {"metadata": {"a": "c"}}, ["metadata={'a': 'c'} where rank 0"]),
    (
        {"key_map": KeyMap({"a": "x", "b": "y"})}, {"key_map": KeyMap({"a": "y", "b": "x"})},
        ["key_map='1 rules ("],
    ),
    ({}, {"key_map": KeyMap(wrappers=False)}, ["wrappers=False", "wrappers=None"]),
    ({}, {"options": WriteOptions(durability="none")}, ["durability='none' where", "'full'"]),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["state", "stored"])
def test_argument_that_differs_is_refused_on_all_ranks(
    tmp_path: Path, exports: Exports, kind: str
) -> None:
    sources, out = same_source(kind, tmp_path), tmp_path / "out"
    for first, second, words in DIFFERENT:
        results = exports(sources, [out, out], first, second)
        said = ("not the same call on every rank: rank 1: ", *words, "nothing was done")
        assert_refused(results, *said)
        assert not out.exists(), words
    exports(sources, [out, out], {}, {})  # the next common call works
    assert_artifact(out, WHOLE)


@pytest.mark.parametrize("kind", ["state", "stored"])
def test_two_ranks_convert_their_own_parts(tmp_path: Path, exports: Exports, kind: str) -> None:
    sources = same_source(kind, tmp_path)
    out, arguments = tmp_path / "out", {"dtype": torch.bfloat16, "metadata": {"who": "us"}}
    results = exports(sources, [out, out], arguments, arguments)
    assert all(isinstance(one, dcpx.ExportReport) for one in results), results
    assert_artifact(out, {name: tensor.bfloat16() for name, tensor in WHOLE.items()})


def test_path_that_differs_is_refused_on_all_ranks(tmp_path: Path, exports: Exports) -> None:
    paths = [tmp_path / ("d" * 200) / f"p{rank}" for rank in range(2)]
    results = exports(halves(WHOLE), paths, {}, {})
    assert_refused(results, "rank 1: path=", "d/p1' where rank 0 has", "d/p0'")
    assert list(tmp_path.iterdir()) == []
    paths = [tmp_path / name for name in ("one.safetensors", "two.safetensors")]
    assert_refused(exports(halves(WHOLE), paths, {}, {}), "two", "one")
    assert list(tmp_path.iterdir()) == []


def test_source_that_differs_is_refused_on_all_ranks(tmp_path: Path, exports: Exports) -> None:
    out = tmp_path / "out"
    for name in ("ckpt", "other"):
        dcpx.save({n: t + (name == "other") for n, t in WHOLE.items()}, tmp_path / name)
    results = exports([WHOLE, tmp_path / "ckpt"], [out, out], {}, {})
    # A long path is cut.
    assert_refused(results, "rank 1: source=", " where rank 0 has 'a module or state dict'")
    results = exports([tmp_path / "ckpt", tmp_path / "other"], [out, out], {}, {})
    assert_refused(results, "rank 1: source=", " where rank 0 has ")
    assert not out.exists()


def test_same_places_and_rules_in_other_words_are_the_same_call(
    tmp_path: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    dcpx.save(WHOLE, tmp_path / "real" / "ckpt")
    sources = [tmp_path / "real" / "ckpt", str(tmp_path / "link" / "ckpt")]
    paths = [tmp_path / "real" / "out", str(tmp_path / "link" / "out" / "model.safetensors")]
    same: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"keys": ["a", "b"]}, {"keys": ("b", "a", "a")}),
        ({"keys": {"a", "b"}}, {"keys": ("b", "a")}),
        ({"keys": "[ab]"}, {"keys": ["[ab]"], "max_shard_bytes": 5 * 10**9}),
        (
            {"keys": "[ab]", "key_map": KeyMap(Split("a", ["x", "y"]), Merge(["x", "y"], "a"))},
            {"keys": "[ab]", "key_map": KeyMap(Split("a", ("x", "y")), Merge(("x", "y"), "a"))},
        ),
        ({"keys": "[ab]", "key_map": None}, {"keys": "[ab]", "key_map": KeyMap()}),
    ]
    for first, second in same:
        for given in (sources, halves(WHOLE)):
            for result in exports(given, paths, first, second):
                assert isinstance(result, dcpx.ExportReport), result
            assert_artifact(tmp_path / "real" / "out", {name: WHOLE[name] for name in "ab"})
            shutil.rmtree(tmp_path / "real" / "out")
    letters = [{"keys": (letter for letter in word)} for word in ("ab", "ba")]
    exports(sources, paths, *letters)
    assert_artifact(tmp_path / "real" / "out", {name: WHOLE[name] for name in "ab"})
    monkeypatch.chdir(tmp_path)
    for result in exports(halves(WHOLE), ["out", tmp_path / "out"], {}, {}):
        assert isinstance(result, dcpx.ExportReport), result
    assert_artifact(tmp_path / "out", WHOLE)


def test_order_of_names_and_names_of_one_rank_alone_are_no_difference(
    tmp_path: Path, exports: Exports
) -> None:
    first, second = halves(WHOLE)
    second = dict(reversed(second.items())) | {"stage1": torch.full((3,), 7.0)}
    first |= {"stage0": torch.full((9,), 8.0)}
    exports([first, second], [tmp_path / "out"] * 2, {}, {})
    both = {"stage0": first["stage0"], "stage1": second["stage1"]}
    assert_artifact(tmp_path / "out", WHOLE | both)


def test_states_of_two_forms_are_refused_and_a_rank_without_names_is_not(
    tmp_path: Path, exports: Exports
) -> None:
    with_part, without = {"model": {"a": torch.ones(2)}}, {"b": torch.ones(2)}
    paths = [tmp_path / "x"] * 2
    results = exports([with_part, without], paths, {}, {})
    assert_refused(results, "rank 0 lie under", "rank 1 under 'no part'")
    assert not list(tmp_path.iterdir())
    results = exports([with_part, {}], paths, {}, {})
    assert [one.tensors for one in results] == [1, 1]


def swapped(name: str) -> str | None:
    return {"a": "b", "b": "a"}.get(name, name)


def without_b(name: str) -> str | None:
    return None if name == "b" else name


class Swapping(KeyMap):
    def resolve(self, *args: Any, **kwargs: Any) -> Any:
        entries = super().resolve(*args, **kwargs)
        return {name: entries[swapped(name) or ""] for name in entries}


@pytest.mark.parametrize("kind", ["state", "stored"])
def test_functions_that_give_ranks_other_names_are_refused_on_all_ranks(
    tmp_path: Path, exports: Exports, kind: str
) -> None:
    sources = same_source(kind, tmp_path)
    for first, second in (
        (KeyMap(lambda name: name), KeyMap(swapped)),
        (KeyMap(lambda name: name), KeyMap(without_b)),
        (KeyMap(), Swapping()),  # no rules, which are all that could be compared
    ):
        results = exports(sources, [tmp_path / "out"] * 2, {"key_map": first}, {"key_map": second})
        assert_refused(results, "rank 1", "key_map")
        assert not (tmp_path / "out").exists()


def test_functions_that_make_one_name_of_other_tensors_are_refused(
    tmp_path: Path, exports: Exports
) -> None:
    merge = Merge(["a", "b"], "ab")  # of rank 1's 'ab' the parts lie the other way round
    maps = [{"key_map": KeyMap(lambda name: name, merge)}, {"key_map": KeyMap(swapped, merge)}]
    results = exports(halves(WHOLE), [tmp_path / "out"] * 2, *maps)
    assert_refused(results, "rank 1", "key_map")
    assert not (tmp_path / "out").exists()
    same = {"key_map": KeyMap(swapped, merge)}
    exports(halves(WHOLE), [tmp_path / "out"] * 2, same, same)
    found = read_artifact(tmp_path / "out")
    assert torch.equal(found["ab"], torch.cat([WHOLE["b"], WHOLE["a"]]))


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        ("ba", "rank 1 makes 'b' where rank 0 has 'a'"),
        ("a", "rank 1 makes 1 tensors where rank 0 has 2"),
    ],
)
def test_offers_are_matched_by_name_and_not_by_place(offered: str, words: str) -> None:
    tensors = [ExportTensor(name, "float32", (2,)) for name in "ab"]
    parts = [
        RankPart([Offer(name, (), None) for name in names], {}, 0, b"") for names in ("ab", offered)
    ]
    check_same_tensors(tensors, parts[:1] * 2)
    with pytest.raises(dcpx.PlanError, match=words):
        check_same_tensors(tensors, parts)


def test_ranks_with_other_budgets_write_a_stored_checkpoint_whole(
    tmp_path: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    real = StoredSource.shares

    def shares(self: Any, rank: int, ranks: int, piece_bytes: int) -> Any:
        pieces.append(piece_bytes)
        return real(self, rank, ranks, piece_bytes)

    monkeypatch.setattr(StoredSource, "shares", shares)
    g = torch.Generator().manual_seed(3)
    whole = {"w": torch.randn(900, 101, generator=g), "v": torch.randn(70_001, generator=g)}
    dcpx.save(whole, tmp_path / "ckpt")
    small = WriteOptions(host_memory_bytes=256 << 10, slot_bytes=256 << 10)
    for budgets in ([None, small], [small, None]):
        given = [{"options": budget} for budget in budgets]
        exports([tmp_path / "ckpt"] * 2, [tmp_path / "out"] * 2, *given)
        assert_artifact(tmp_path / "out", whole)
        shutil.rmtree(tmp_path / "out")
    assert pieces == [(256 << 10) // 16] * 4  # what the smaller budget bears
