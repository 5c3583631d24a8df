"""Stock checkpoints of other versions, writers and tools: values, and which loader they took."""

from __future__ import annotations

import io
import itertools
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.foreign import (
    Piece,
    Region,
    big_endian,
    read_regions,
    rezipped,
    torch_items,
    write_foreign,
)
from support.machine import points
from support.saves import READERS, change, raises_one
from support.states import DTYPES, assert_same, random_bytes
from support.zip_samples import saved
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.serialization import config

from torch_dcpx import (
    CorruptionError,
    DcpxReader,
    NotCommittedError,
    ReadOptions,
    UnsafePickleError,
)
from torch_dcpx.reader import rows
from torch_dcpx.reader.locate import Form, Located


def sample() -> torch.Tensor:
    return torch.arange(50 * 101, dtype=torch.float32).reshape(50, 101)


@contextmanager
def without_crc() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def saved_without_crc(tensor: torch.Tensor) -> bytes:
    with without_crc():
        return saved(tensor)


def saved_aligned(alignment: int) -> Callable[[torch.Tensor], bytes]:
    def save(tensor: torch.Tensor) -> bytes:
        with config.patch("save.storage_alignment", alignment):
            return saved(tensor)

    return save


def saved_by_protocol(protocol: int) -> Callable[[torch.Tensor], bytes]:
    def save(tensor: torch.Tensor) -> bytes:
        buffer = io.BytesIO()
        torch.save(tensor, buffer, pickle_protocol=protocol)
        return buffer.getvalue()

    return save


def saved_without_zip(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


OLD_RECORDS = dict.fromkeys(
    (".format_version", ".storage_alignment", "byteorder", ".data/serialization_id")
)
DEFLATED = zipfile.ZIP_DEFLATED

# name -> (item of a tensor, is it left to torch's loader)
SHAPES: dict[str, tuple[Callable[[torch.Tensor], bytes], bool]] = {
    "as saved today": (saved, False),
    "records of old torch": (lambda t: rezipped(saved(t), OLD_RECORDS), False),
    "big-endian": (big_endian, False),
    "big-endian and transposed": (lambda t: big_endian(t.t().contiguous().t()), False),
    "no CRC": (saved_without_crc, False),
    "alignment 1": (saved_aligned(1), False),
    "alignment 4096": (saved_aligned(4096), False),
    "alignment 65536": (saved_aligned(65536), False),
    "protocol 3": (saved_by_protocol(3), False),
    "protocol 5": (saved_by_protocol(5), False),
    "transposed": (lambda t: saved(t.t().contiguous().t()), False),
    "view of a larger storage": (lambda t: saved(torch.cat([t, t])[50:]), False),
    "strided view": (lambda t: saved(torch.stack([t, t], -1)[..., 1]), False),
    "requires grad": (lambda t: saved(t.clone().requires_grad_()), False),
    "Parameter": (lambda t: saved(torch.nn.Parameter(t)), True),
    "Parameter, big-endian": (lambda t: big_endian(torch.nn.Parameter(t)), True),
    "conjugate view": (lambda t: saved(torch.complex(t, -t).conj()), True),
    "deflated": (lambda t: rezipped(saved(t), compression=DEFLATED), True),
    "deflated payload": (lambda t: rezipped(saved(t), compression=DEFLATED, only="data/0"), True),
    "deflated pickle": (lambda t: rezipped(saved(t), compression=DEFLATED, only="data.pkl"), True),
    "no zip": (saved_without_zip, True),
}
NOT_READ_BY_STOCK = {"protocol 3", "protocol 5"}  # it warns of the one and fails at the other


def test_item_of_any_making_loads_whole_and_in_part(tmp_path: Path) -> None:
    for shape, (encode, is_left_to_torch) in SHAPES.items():
        check_item(tmp_path / shape, shape, encode, is_left_to_torch)


def check_item(
    path: Path, shape: str, encode: Callable[[torch.Tensor], bytes], is_left_to_torch: bool
) -> None:
    value = sample()
    expected = torch.complex(value, value) if shape == "conjugate view" else value
    piece = Piece("t", encode(value), expected)
    path.mkdir()
    write_foreign(path, [piece])
    regions = [
        Region(piece.index, (0, 0), (50, 101)),
        Region(piece.index, (3, 7), (40, 50)),
        Region(piece.index, (49, 100), (1, 1)),
    ]
    for name, reader_class in READERS.items():
        if name == "stock" and shape in NOT_READ_BY_STOCK:
            continue
        targets = [torch.zeros(region.lengths, dtype=expected.dtype) for region in regions]
        reader = reader_class(path)
        read_regions(reader, regions, targets)
        assert_same(
            [expected, expected[3:43, 7:57], expected[49:, 100:]], targets, f"{name}: {shape}"
        )
        if name == "ours":
            assert torch_items(reader) == (3 if is_left_to_torch else 0), shape


def test_alignment_of_the_config_is_what_the_items_above_were_saved_with() -> None:
    record = saved_aligned(4096)(sample())
    assert record.index(sample().numpy().tobytes()) % 4096 == 0


def as_before_2_9(metadata: Metadata) -> None:
    del metadata.__dict__["version"]


def as_before_2_3(metadata: Metadata) -> None:
    del metadata.__dict__["version"]
    del metadata.__dict__["storage_meta"]


def without_hints(metadata: Metadata) -> None:
    assert metadata.storage_data is not None
    for index in metadata.storage_data:
        index.__dict__.pop("index")


def as_torch_2_0(metadata: Metadata) -> bytes:
    """Pickles it by the names under which torch 2.0 kept the properties."""
    new = b"ctorch.distributed.checkpoint.metadata\n"
    old = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    data = pickle.dumps(metadata, protocol=2)
    for now, then in ((b"TensorProperties", b"TensorProperties"),
                      (b"_MEM_FORMAT_ENCODING", b"MEM_FORMAT_ENCODING")):  # fmt: skip
        assert new + now in data
        data = data.replace(new + now, old + then)
    return data


METADATA: dict[str, dict[str, Any]] = {
    "of torch 2.8": {"change": as_before_2_9},
    "of torch 2.2": {"change": as_before_2_3},
    "of torch 2.0": {"change": as_before_2_3, "encode": as_torch_2_0},
    "without hints": {"change": without_hints},
    **{
        f"protocol {n}": {"encode": lambda m, n=n: pickle.dumps(m, protocol=n)} for n in range(2, 6)
    },
}


def pieces_of_two_ranks() -> tuple[dict[str, Any], list[Piece]]:
    """Returns a state, and its chunks in files as other writers name them."""
    value = sample()
    state = {"grid": value, "whole": value[:, 0].clone(), "step": 7}
    chunks = [value[:20, :60], value[20:, :60], value[:, 60:]]
    pieces = [
        Piece("step", saved(7), path="rank0/part-0.bin"),
        Piece("grid", saved(chunks[0].clone()), chunks[0], (0, 0), "rank0/part-0.bin"),
        Piece("grid", saved(chunks[1].clone()), chunks[1], (20, 0), "rank0/part-1.bin"),
        Piece("grid", saved(chunks[2].clone()), chunks[2], (0, 60), "rank1/pärt 0", hint=2),
        Piece("whole", saved(state["whole"]), state["whole"], (), "a/b/c/whole"),
    ]
    return state, pieces


def test_metadata_of_any_version_and_files_of_any_name_load(tmp_path: Path) -> None:
    state, pieces = pieces_of_two_ranks()
    for (kind, made), (name, reader_class) in itertools.product(METADATA.items(), READERS.items()):
        path = tmp_path / kind / name
        path.mkdir(parents=True)
        write_foreign(path, pieces, **made)
        target = {"grid": torch.zeros(50, 101), "whole": torch.zeros(50), "step": None}
        reader = reader_class(path)
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert_same(state, target, f"{name}: {kind}")
        if name == "ours":
            assert torch_items(reader) == 0


# ---- Items that extensions changed ---------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.arange(5000), {"step": 3, "name": "x" * 5000}], ids=type)
@pytest.mark.parametrize("damage", ["head", "cut off"])
@pytest.mark.usefixtures("no_leaks")
def test_damaged_compressed_item_is_corruption_by_name_and_file(
    tmp_path: Path, value: Any, damage: str
) -> None:
    dcp.save(
        {"layer.item": value},
        storage_writer=dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()]),
        no_dist=True,
    )
    path = tmp_path / "__0_0.distcp"
    size = path.stat().st_size
    if damage == "cut off":
        change(path, size // 2, bytes(size - size // 2))
    else:
        change(path, 0, b"\xff" * 16)
    with raises_one(CorruptionError) as raised:
        target = {"layer.item": torch.zeros(5000, dtype=torch.int64)}
        if isinstance(value, dict):
            target = {"layer.item": dict.fromkeys(value)}
        dcp.load(target, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert raised.error.fqn.startswith("layer.item")
    assert raised.error.path == str(path)


def test_extension_that_the_registry_lacks_is_stocks_error(tmp_path: Path) -> None:
    value = sample()
    write_foreign(tmp_path, [Piece("t", saved(value), value, descriptors=["stream.rot13/1"])])
    texts = []
    for reader_class in READERS.values():
        with raises_one(ValueError) as raised:
            dcp.load(
                {"t": torch.zeros(50, 101)}, storage_reader=reader_class(tmp_path), no_dist=True
            )
        texts.append(str(raised.error))
    assert texts[0] == texts[1]


# ---- Byte items ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "encode", [saved_without_zip, lambda v: rezipped(saved(v), None, DEFLATED)]
)
def test_byte_item_of_another_shape_is_refused_by_name_unless_trusted(
    tmp_path: Path, encode: Callable[[Any], bytes]
) -> None:
    write_foreign(tmp_path, [Piece("config", encode({"width": 3}))])
    with raises_one(UnsafePickleError) as raised:
        dcp.load({"config": None}, storage_reader=DcpxReader(tmp_path), no_dist=True)
    assert "trusted=True" in str(raised.error)
    assert raised.error.fqn == "config"
    target: dict[str, Any] = {"config": None}
    reader = DcpxReader(tmp_path, options=ReadOptions(trusted=True))
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target == {"config": {"width": 3}}


def test_directory_of_safetensors_is_no_committed_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(8))
    with raises_one(NotCommittedError):
        dcp.load({"t": torch.zeros(1)}, storage_reader=DcpxReader(tmp_path), no_dist=True)


# ---- Any layout, any region ----------------------------------------------------------------------


def random_layout(rng: random.Random) -> torch.Tensor:
    """Returns a tensor of random bytes: offset, strided, permuted, expanded, with dimensions of
    size 0 and 1, of a storage larger than it needs.
    """
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randint(0, 4))]
    tensor = random_bytes(tuple(shape), rng.choice(DTYPES), generator)
    for dim, size in enumerate(shape):
        start = rng.randrange(size) if rng.random() < 0.95 else size
        cut = slice(start, None, rng.choice([1, 1, 2, 3]))
        tensor = tensor[(slice(None),) * dim + (cut,)]
    tensor = tensor.permute(rng.sample(range(tensor.dim()), tensor.dim()))
    return tensor.expand(rng.choice([1, 4]), *tensor.shape) if rng.random() < 0.2 else tensor


def random_target(rng: random.Random, like: torch.Tensor) -> torch.Tensor:
    """Returns zeros of its shape, dense or every second element of something larger."""
    space = torch.zeros([2 * size for size in like.shape], dtype=like.dtype)
    every = tuple(slice(0, None, rng.choice([1, 2])) for _ in like.shape)
    return space[every][tuple(slice(0, size) for size in like.shape)]


def test_any_region_of_any_layout_is_what_torch_cuts_out(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    pieces, wanted = [], []
    for number in range(points(200)):
        stored = random_layout(rng)
        kinds = [saved, saved_without_crc, big_endian] if stored.dtype.itemsize > 1 else [saved]
        pieces.append(Piece(f"t{number}", rng.choice(kinds)(stored), stored, (), f"{number % 7}"))
        for _ in range(4):
            begin = [rng.randint(0, max(size - 1, 0)) for size in stored.shape]
            least = 0 if rng.random() < 0.05 else 1
            sizes = [
                rng.randint(min(least, size - at), size - at)
                for at, size in zip(begin, stored.shape, strict=True)
            ]
            box = tuple(slice(at, at + n) for at, n in zip(begin, sizes, strict=True))
            region = Region(pieces[-1].index, tuple(begin), tuple(sizes))
            wanted.append((region, stored[box], random_target(rng, stored[box])))
    rng.shuffle(wanted)
    write_foreign(tmp_path, pieces)
    reader = DcpxReader(tmp_path)
    read_regions(reader, [region for region, _, _ in wanted], [into for _, _, into in wanted])
    assert torch_items(reader) == 0
    for region, expected, found in wanted:
        assert_same(expected, found, f"{region}")


@pytest.mark.parametrize(
    ("offsets", "lengths", "payload_bytes", "first"),
    [
        ((0, 0), (3, 4), 60, 3),  # elements 3 to 14
        ((1, 2), (2, 2), 60, 9),
        ((0, 0), (3, 4), 59, None),
        ((2, 3), (1, 1), 59, None),
        ((2, 3), (1, 0), 59, 14),  # no element
        ((2, 0), (2, 4), 900, None),
        ((0, -1), (1, 1), 900, None),
    ],
)
def test_region_that_a_payload_does_not_hold_is_corruption(
    offsets: tuple[int, ...], lengths: tuple[int, ...], payload_bytes: int, first: int | None
) -> None:
    form = Form("torch", (3, 4), (4, 1), "", "FloatStorage", "", False)
    located = Located(0, "file", form, 0, payload_bytes, 3)
    if first is not None:
        assert rows._first_element(located, "w", offsets, lengths, 4) == first
        return
    with pytest.raises(CorruptionError, match="'w' in 'file'"):
        rows._first_element(located, "w", offsets, lengths, 4)
