"""Tensors by name: `load_tensors`, and slices of an open checkpoint beside torch's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as st
import torch
import torch.distributed as dist
from export_cases import mixed_state
from support.chunked import Box, Chunked
from support.foreign import Piece, write_foreign
from support.no_collectives import no_collectives
from support.saves import save, save_rank_local
from support.states import assert_same
from support.zip_samples import saved

import torch_dcpx as dcpx
from torch_dcpx import OptionError, ReadOptions, UnknownNameError, UnsupportedError
from torch_dcpx.artifacts.rows import narrowed
from torch_dcpx.artifacts.slices import boxes_of, cut_of
from torch_dcpx.reader.reader import DcpxReader

TIGHT = ReadOptions(host_memory_bytes=256 << 10, slot_bytes=256 << 10)
KINDS = ("ours", "stock", "safetensors")


def write(state: dict[str, torch.Tensor], path: Path, kind: str) -> None:
    if kind == "safetensors":
        path.mkdir()
        held = {name: tensor.contiguous() for name, tensor in state.items()}
        st.save_file(held, path / "model.safetensors")
    else:
        save(state, path, kind)


def random_index(shape: torch.Size, pick: random.Random) -> Any:
    """Returns an index that torch takes, too."""
    parts: list[Any] = []
    for size in shape[: pick.randint(0, len(shape))]:
        ends = [None, *range(-size - 2, size + 3)]
        if size and pick.random() < 0.3:
            parts.append(pick.randrange(-size, size))
        else:
            step = pick.choice([None, 1, 2, 3, size + 1])
            parts.append(slice(pick.choice(ends), pick.choice(ends), step))
    if pick.random() < 0.3:
        parts.insert(0 if len(parts) < len(shape) else pick.randint(0, len(parts)), ...)
        if parts[0] is ... and len(parts) > 1:  # what follows the dots counts from the end
            parts = [..., slice(None, None, pick.choice([None, 2]))]
    return tuple(parts) if pick.random() < 0.9 or len(parts) != 1 else parts[0]


# ---- What is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_all_tensors_come_bit_for_bit_and_objects_are_left_out(tmp_path: Path, kind: str) -> None:
    state = mixed_state()
    extra = {} if kind == "safetensors" else {"step": 3}
    write({**state, **extra}, tmp_path / "ckpt", kind)
    found = dcpx.load_tensors(tmp_path / "ckpt")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert_same(found[name], tensor)
        assert found[name].is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [ReadOptions(), TIGHT])
def test_slices_of_every_tensor_are_those_of_torch(
    tmp_path: Path, seed: int, kind: str, options: ReadOptions
) -> None:
    state, pick = mixed_state(), random.Random(seed)
    write(state, tmp_path / "ckpt", kind)
    with dcpx.open_checkpoint(tmp_path / "ckpt", options) as checkpoint:
        assert set(checkpoint) == state.keys()
        for name, tensor in state.items():
            lazy = checkpoint[name]
            assert (lazy.shape, lazy.dtype, lazy.ndim) == (tensor.shape, tensor.dtype, tensor.ndim)
            assert lazy.nbytes == tensor.numel() * tensor.element_size()
            for index in [..., *(random_index(tensor.shape, pick) for _ in range(12))]:
                assert_same(lazy[index], tensor[index])


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_slices_across_the_chunks_of_a_sharded_tensor_are_those_of_the_whole(
    tmp_path: Path, seed: int, kind: str
) -> None:
    g, pick = torch.Generator().manual_seed(seed), random.Random(seed)
    whole = torch.randn(40, 30, generator=g)
    boxes = [
        Box((r, c), (min(17, 40 - r), min(11, 30 - c))) for r in (0, 17, 34) for c in (0, 11, 22)
    ]
    if kind == "stock":
        pieces = [
            Piece("w", saved(whole[b.slices].clone()), whole[b.slices], b.offsets) for b in boxes
        ]
        write_foreign(tmp_path, pieces)
    else:
        sharded: Any = torch.Tensor._make_subclass(Chunked, torch.empty(0))
        sharded.whole_size, sharded.boxes = whole.shape, boxes
        sharded.parts = [whole[box.slices].clone() for box in boxes]
        save({"w": sharded}, tmp_path)
    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        for index in [..., *(random_index(whole.shape, pick) for _ in range(40))]:
            assert_same(checkpoint["w"][index], whole[index])


def test_slice_reads_the_blocks_of_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Any] = []
    read_data = DcpxReader.read_data

    def noted(self: DcpxReader, *args: Any) -> Any:
        result = read_data(self, *args)
        reports.append(self.last_report)
        return result

    monkeypatch.setattr(DcpxReader, "read_data", noted)
    row, block = 1 << 20, 64 << 10  # bytes of a row, and of what one checksum is of
    rows = torch.arange(64 * (row // 4), dtype=torch.int32).view(64, -1)
    save({"rows": rows}, tmp_path)
    with dcpx.open_checkpoint(tmp_path, ReadOptions(direct_io=False)) as checkpoint:
        assert reports == []
        lazy = checkpoint["rows"]
        for index, nbytes in [(slice(3, 7), 4 * row), (5, row), (slice(0, 64, 16), 4 * row)]:
            assert_same(lazy[index], rows[index])
            assert reports[-1].needed_bytes == nbytes
            edges = 2 * block * (1 if index != slice(0, 64, 16) else 4)
            assert nbytes <= reports[-1].read_bytes <= nbytes + edges
            assert reports[-1].verified_bytes == reports[-1].read_bytes
        assert lazy[60:60].numel() == 0
        assert len(reports) == 3
    with dcpx.open_checkpoint(tmp_path, ReadOptions(direct_io=False, verify="none")) as checkpoint:
        assert_same(checkpoint["rows"][3:7], rows[3:7])
        assert reports[-1].read_bytes == 4 * row


def test_boxes_with_gaps_stay_within_the_budget_and_fill_the_result_once(seed: int) -> None:
    pick = random.Random(seed)
    for _ in range(60):
        sizes = tuple(pick.randint(1, 40) for _ in range(pick.randint(1, 3)))
        source = torch.arange(torch.Size(sizes).numel()).view(sizes)
        index = tuple(slice(None, None, pick.randint(1, 7)) for _ in sizes)
        cut, most = cut_of(index, sizes, "t"), pick.choice([8, 100, 4000])
        memory = torch.full(cut.counts, -1)
        for box in boxes_of(cut, sizes, memory, most):
            region = narrowed(source, box.offsets, box.lengths)
            assert region.shape == box.lengths
            if box.has_gaps:
                assert region.nbytes <= most
            assert box.place.is_contiguous()
            assert (box.place == -1).all()
            box.place.copy_(region[tuple(slice(None, None, step) for step in box.steps)])
        assert torch.equal(memory, source[index])


def test_sparse_rows_with_blocks_between_them_are_boxes_of_their_own() -> None:
    sizes = (8, 64 << 10)
    memory = torch.empty(4, 64 << 10, dtype=torch.uint8)
    boxes = list(boxes_of(cut_of(slice(None, None, 2), sizes, "t"), sizes, memory, 1 << 30))
    assert [box.offsets for box in boxes] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert not any(box.has_gaps for box in boxes)


@pytest.mark.parametrize("target", ["ckpt", "y.pt"])
def test_default_device_of_the_caller_changes_nothing(tmp_path: Path, target: str) -> None:
    rows = torch.arange(600.0).view(20, 30)
    if target == "ckpt":
        save({"w": rows}, tmp_path / target)
    else:
        torch.save({"w": rows}, tmp_path / target)
    with torch.device("meta"), dcpx.open_checkpoint(tmp_path / target) as checkpoint:
        found = [checkpoint["w"][1::3, ::2], checkpoint["w"][4], checkpoint.load_tensors()["w"]]
    for tensor, expected in zip(found, (rows[1::3, ::2], rows[4], rows), strict=True):
        assert_same(tensor, expected)


def test_no_process_group_is_asked(tmp_path: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    save({"w": torch.arange(6.0), "step": 4}, tmp_path)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        with no_collectives(), dcpx.open_checkpoint(tmp_path) as checkpoint:
            assert_same(checkpoint["w"][2:], torch.arange(2.0, 6.0))
            assert checkpoint.objects["step"] == 4
            assert_same(dcpx.load_tensors(tmp_path)["w"], torch.arange(6.0))
    finally:
        dist.destroy_process_group()


def test_metadata_of_a_rank_is_read_where_ranks_have_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        save_rank_local({"w": torch.full((3,), float(rank)), "rank": rank}, tmp_path, rank)
    with pytest.raises(dcpx.NotCommittedError, match=r"metadata of 2 ranks, .* take rank="):
        dcpx.load_tensors(tmp_path)
    with pytest.raises(dcpx.NotCommittedError, match="but metadata of 2 other"):
        dcpx.load_tensors(tmp_path, rank=2)
    for rank in range(2):
        with dcpx.open_checkpoint(tmp_path, rank=rank) as checkpoint:
            assert_same(checkpoint["w"][...], torch.full((3,), float(rank)))
            assert checkpoint.objects["rank"] == rank


def test_rank_of_a_checkpoint_of_all_ranks_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    for rank in (0, np.int64(1)):
        with pytest.raises(dcpx.NotCommittedError, match=r"of all ranks.*: leave out rank"):
            dcpx.load_tensors(tmp_path, rank=rank)


# ---- Keys ----------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    layer = {"weight": torch.ones(2, 3), "bias": torch.zeros(3)}
    model = {"a": layer, "b[0]": {"weight": torch.full((2,), 7)}}
    save({"model": model, "step": 12, "names": ["x", "y"]}, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_keys_are_names_and_globs(stored: Path) -> None:
    weight, bias, other = "model.a.weight", "model.a.bias", "model.b[0].weight"
    cases: list[tuple[Any, list[str]]] = [
        (None, [weight, bias, other]),
        (bias, [bias]),
        ("*.weight", [weight, other]),
        (other, [other]),  # a name before a glob
        (["model.a.*", "model.b*"], [weight, bias, other]),
        ((one for one in [bias, bias]), [bias]),
        ([], []),
    ]
    for keys, names in cases:
        assert list(dcpx.load_tensors(stored, keys)) == names, keys


UNKNOWN: list[tuple[str, str, tuple[str, ...]]] = [
    ("a.weight", "did you mean: 'model.a.weight'", ("model.a.weight",)),
    ("nothing.*", "it holds 3 tensors: 'model.a.weight', ", ()),
    ("step", "is an object: open_checkpoint(path).objects has it", ()),
    ("", "it holds 3 tensors", ()),
]


def test_name_or_glob_that_is_not_stored_is_a_key_error_with_near_names(stored: Path) -> None:
    for key, text, nearest in UNKNOWN:
        with pytest.raises(UnknownNameError) as caught:
            dcpx.load_tensors(stored, ["model.a.bias", key])
        error = caught.value
        assert isinstance(error, KeyError)
        assert text in str(error)
        assert (error.fqn, error.path, error.nearest) == (key, str(stored), nearest)
        with dcpx.open_checkpoint(stored) as checkpoint:
            with pytest.raises(UnknownNameError):
                checkpoint[key]
            assert key not in checkpoint
            assert checkpoint.get(key) is None


def test_argument_that_cannot_work_is_named(stored: Path) -> None:
    wrong: dict[str, list[Any]] = {
        "keys": [3, [b"model.a.bias"], {"model.a.bias": "x"}],
        "options": [{}, dcpx.WriteOptions()],
        "device": ["nowhere", "meta", None],
        "rank": [-1, True],
    }
    for option, values in wrong.items():
        for value in values:
            with pytest.raises(OptionError, match=f"^{option} must be") as caught:
                dcpx.load_tensors(stored, **{option: value})
            assert caught.value.option == option


INDICES: list[tuple[Any, str]] = [
    (None, r"None \(a new dimension\)"), (True, "bool"), ([0, 1], "list"),
    (torch.tensor([0]), "Tensor"), (torch.tensor(True), "Tensor"), (1.0, "float"),
    ((0, "a"), "str"), (slice(None, None, -1), "steps below 0"), (slice(None, None, 0), "zero"),
    (slice(0.5, None), "integers"),
]  # fmt: skip
OUTSIDE: list[Any] = [2, -3, (0, 3), (0, 0, 0), (..., ...), (slice(None), 0, 0)]


def test_index_that_is_not_taken_or_outside_is_refused_by_name(stored: Path) -> None:
    with dcpx.open_checkpoint(stored) as checkpoint:
        lazy = checkpoint["model.a.weight"]
        for index, text in INDICES:
            with pytest.raises(UnsupportedError, match=f"'model.a.weight' by .*{text}"):
                lazy[index]
        for index in OUTSIDE:
            with pytest.raises(IndexError, match=r"model\.a\.weight"):
                lazy[index]
        assert [row.tolist() for row in lazy] == [[1.0] * 3] * 2


def test_length_is_that_of_the_first_dimension_and_a_scalar_has_none(tmp_path: Path) -> None:
    save({"w": torch.ones(4, 2), "s": torch.tensor(2)}, tmp_path)
    with dcpx.open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint["w"]) == 4
        assert checkpoint["s"][()] == 2
        with pytest.raises(TypeError, match="'s' has no dimensions"):
            len(checkpoint["s"])
