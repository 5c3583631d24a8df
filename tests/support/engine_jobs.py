"""WriteJob and ReadJob through the door, as tests use them: tensors in, files and rows out."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from support.states import DTYPES, random_bytes

from torch_dcpx import _C
from torch_dcpx._compat import dtype_name, framing_of
from torch_dcpx.reader.locate import Form, Located
from torch_dcpx.tensors.memory import is_dense
from torch_dcpx.writer.rows import BYTES, TENSOR, ItemType, WriteRow

SLOT_BYTES = 256 << 10

small_shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
large_shapes = st.sampled_from(
    [(70_001,), (33, 2, 1021), (300, 257), (7, 3, 11, 400), (1, 150_000)]
)
shapes = st.one_of(small_shapes, large_shapes)
layouts = st.sampled_from(["contiguous", "permuted", "sliced", "expanded", "shifted"])


class TensorSpec(NamedTuple):
    """Enough to make one tensor; small, so that hypothesis shows and shrinks it well."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int


specs = st.builds(TensorSpec, shapes, st.sampled_from(DTYPES), layouts, st.integers(0, 1 << 30))


def make(spec: TensorSpec) -> torch.Tensor:
    """Returns a tensor of random bits whose memory lies as `spec.layout` says."""
    g = torch.Generator().manual_seed(spec.seed)
    pick = random.Random(spec.seed)
    shape, dims = spec.shape, len(spec.shape)
    if spec.layout == "permuted" and dims > 1:
        order = pick.sample(range(dims), dims)
        stored = random_bytes(tuple(shape[d] for d in order), spec.dtype, g)
        return stored.permute([order.index(d) for d in range(dims)])
    if spec.layout == "sliced" and dims:
        wide = random_bytes((*shape[:-1], 2 * shape[-1] + 3), spec.dtype, g)
        return wide[..., 1 : 1 + 2 * shape[-1] : 2]
    if spec.layout == "expanded" and dims:
        narrow = random_bytes(tuple(1 if pick.random() < 0.5 else n for n in shape), spec.dtype, g)
        return narrow.expand(shape)
    if spec.layout == "shifted":
        flat = random_bytes((7 + int(torch.Size(shape).numel()),), spec.dtype, g)
        return flat[7:].reshape(shape)
    return random_bytes(shape, spec.dtype, g)


class Saved(NamedTuple):
    """What one WriteJob left in a directory."""

    items: list[torch.Tensor | bytes]
    files: list[tuple[str, bool, int, bytes, int, bytes]]  # as ReadJob.locate takes them
    wanted: list[tuple[int, int, int, bool]]
    report: dict[str, int]

    def data_bytes(self, file: int) -> int:
        """Where the data of a file ends and its footer's padding begins."""
        return max(offset + nbytes for f, offset, nbytes, _ in self.wanted if f == file)


def item_type(dtype: torch.dtype) -> ItemType:
    name = dtype_name(dtype)
    return ItemType(*framing_of(dtype), dtype.itemsize, 0, 0, name, name, "strided")


def write_row(item: torch.Tensor | bytes, file: int, type_index: int, fqn: str) -> WriteRow:
    if isinstance(item, bytes):
        return WriteRow(
            file, BYTES, type_index, item, len(item), (), (), True, fqn, (), (), None
        )  # fmt: skip
    return WriteRow(
        file, TENSOR, type_index, item.data_ptr() if item.nbytes else 0, item.nbytes, item.shape,
        item.stride(), is_dense(item) or item.nbytes == 0, fqn, item.shape, (0,) * item.dim(), None,
    )  # fmt: skip


def write(
    directory: Path,
    items: Sequence[torch.Tensor | bytes],
    *,
    files: int = 1,
    windows: int = 1,
    workers: int = 4,
    segment_bytes: int = SLOT_BYTES,
    use_direct: bool = True,
    is_durable: bool = False,
    files_at_once: int = 1,
    in_place: str = "auto",
) -> Saved:
    """Writes `items`, spread evenly over files in their order, in `windows` calls."""
    with open_directory(directory) as fd:
        job = _C.WriteJob(
            dir_fd=fd, dir_path=str(directory), workers=workers, segment_bytes=segment_bytes,
            use_direct=use_direct, is_durable=is_durable, files_at_once=files_at_once,
            in_place=in_place,
        )  # fmt: skip
        for f in range(files):
            job.add_file([f"__0_{f}.distcp"], bytes([f] * 16), 0)
    dtypes = sorted({t.dtype for t in items if isinstance(t, torch.Tensor)}, key=str)
    types = [item_type(torch.uint8), *map(item_type, dtypes)]  # bytes have none of their own
    rows = [
        write_row(
            item, i * files // len(items),
            0 if isinstance(item, bytes) else dtypes.index(item.dtype) + 1, f"item{i}",
        )
        for i, item in enumerate(items)
    ]  # fmt: skip
    placed: list[tuple[int, int]] = []
    for w in range(windows):
        part = rows[w * len(rows) // windows : (w + 1) * len(rows) // windows]
        placed += zip(*job.write(part, types, is_final=w + 1 == windows), strict=True)
    results = {row[0]: row for row in job.results()}
    assert sorted(results) == sorted(job.created())
    found = []
    for f in range(files):
        name, file_id, nbytes, footer_crc = results[f"__0_{f}.distcp"]
        assert file_id == bytes([f] * 16)
        assert (directory / name).stat().st_size == nbytes
        found.append((name, True, nbytes, file_id, footer_crc, b""))
    wanted = [
        (row.file, offset, nbytes, row.kind == TENSOR)
        for row, (offset, nbytes) in zip(rows, placed, strict=True)
    ]
    return Saved(list(items), found, wanted, job.report())


@contextmanager
def open_directory(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def scratch() -> Iterator[Path]:
    """One directory for one example: tmp_path is shared by all of a test."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def read_job(directory: Path, **kwargs: Any) -> _C.ReadJob:
    options = {
        "workers": 4, "slot_bytes": SLOT_BYTES, "use_direct": True, "verify": True,
        "max_open_files": 2, **kwargs,
    }  # fmt: skip
    with open_directory(directory) as fd:
        return _C.ReadJob(dir_fd=fd, dir_path=str(directory), **options)


def locate(job: _C.ReadJob, saved: Saved) -> list[Located]:
    forms, places = job.locate(saved.files, saved.wanted)
    return [
        Located(wanted[0], saved.files[wanted[0]][0], Form(*forms[form]), *place)
        for wanted, (form, *place) in zip(saved.wanted, places, strict=True)
    ]


def drop_cache(directory: Path) -> None:
    """Asks the kernel to forget the files' pages, so that direct reads are chosen."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
