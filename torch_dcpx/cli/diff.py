"""`dcpx diff`: how two checkpoints differ: names, shapes, dtypes, then values.

Values are compared by the checksums in the footers, which read nothing but these, wherever both
checkpoints cut a tensor alike. Else, as on another number of ranks, in checkpoints of stock DCP
and in files of an export, both tensors are read piece by piece.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_dcpx._text import counted, human_bytes, printable
from torch_dcpx.artifacts.opened import LazyTensor, OpenCheckpoint, open_checkpoint
from torch_dcpx.artifacts.rows import slabs
from torch_dcpx.cli.output import FINE, UNSOUND, put_json, put_lines, put_table
from torch_dcpx.cli.page import Page, put_written
from torch_dcpx.errors import UnsafePickleError, UnsupportedError
from torch_dcpx.integrity.contents import open_contents, read_commit
from torch_dcpx.integrity.footers import TORCH_TENSOR, FooterRow, add_file
from torch_dcpx.options import ReadOptions
from torch_dcpx.storage.names import metadata_name
from torch_dcpx.storage.object_url import Location

_PIECE_BYTES = 32 << 20  # of each side, in memory at one time


class Difference(NamedTuple):
    """One name that differs."""

    name: str
    what: str  # "only in A", "only in B", "kind", "shape", "dtype" or "values"
    a: str = ""
    b: str = ""


class Sum(NamedTuple):
    """The checksum of one stored chunk, and all that its bytes depend on besides values."""

    form: tuple[Any, ...]
    numel: int
    crc: int


def run_diff(
    a: Location,
    b: Location,
    *,
    rank: int | None,
    limit: int,
    as_json: bool,
    page: Page | None,
) -> int:
    """Prints how two checkpoints differ, and draws it on `page`. Returns the exit code: 1 if they
    do.
    """
    with open_checkpoint(a, rank=rank) as one, open_checkpoint(b, rank=rank) as two:
        run = _Run(one, two, _sums(a, rank), _sums(b, rank))
        found = run.differences()
        if page is not None:
            counts = {"equal": run.equal, "read_bytes": run.read_bytes}
            paths = {"a": printable(a), "b": printable(b)}
            page.write("diff", {**paths, **counts, "items": _columns(one, two, found)})
    if as_json:
        put_json({"equal": run.equal, "read_bytes": run.read_bytes, "differences": found})
    else:
        if found:
            put_table(["name", "difference", "A", "B"], found[:limit] if limit > 0 else found)
        more = f" ({len(found) - limit} not shown)" if 0 < limit < len(found) else ""
        names = f"{counted(len(found), 'difference')}{more}, {counted(run.equal, 'equal name')}"
        put_lines([f"{names}; read {human_bytes(run.read_bytes)} of values, the rest by checksums"])
        put_written(page)
    return UNSOUND if found else FINE


def _columns(
    one: OpenCheckpoint, two: OpenCheckpoint, found: Sequence[Difference]
) -> dict[str, list[Any]]:
    """Returns all names of both sides as the page shows them, a list for each column."""
    whats = {each.name: each.what for each in found}
    sides = one, two
    names = list(dict.fromkeys(name for side in sides for name in (*side, *side.objects)))
    columns: dict[str, list[Any]] = {
        "name": list(map(printable, names)),
        "what": [whats.get(name, "equal") for name in names],
    }
    for letter, side in zip("ab", sides, strict=True):
        columns[letter] = [
            _shown(side, name) if name in side or name in side.objects else "" for name in names
        ]
        columns[f"bytes_{letter}"] = [side[name].nbytes if name in side else 0 for name in names]
    return columns


class _Run:
    """One comparison. Not thread-safe."""

    def __init__(
        self,
        one: OpenCheckpoint,
        two: OpenCheckpoint,
        sums_of_one: dict[str, dict[Any, Sum]],
        sums_of_two: dict[str, dict[Any, Sum]],
    ) -> None:
        self._sides = one, two
        for side in self._sides:
            side.check_claims()
        self._sums = sums_of_one, sums_of_two
        self.equal = 0
        self.read_bytes = 0

    def differences(self) -> list[Difference]:
        """Returns the names that differ: A's in their order, then those of B alone."""
        one, two = self._sides
        found: dict[str, Difference] = {}
        unclear: list[str] = []  # tensors that the checksums cannot tell
        names = (*one, *one.objects)
        for name in names:
            is_tensor = name in one
            if name not in two and name not in two.objects:
                found[name] = Difference(name, "only in A", _shown(one, name))
            elif is_tensor != (name in two):
                found[name] = Difference(name, "kind", _shown(one, name), _shown(two, name))
            elif is_tensor and (form := self._unlike_form(name)):
                found[name] = form
            else:
                same = self._same_sums(name, one[name].shape.numel() if is_tensor else 1)
                if is_tensor and same is None:
                    unclear.append(name)
                elif not same and (is_tensor or not self._is_same_object(name)):
                    found[name] = Difference(name, "values")
        found |= {each.name: each for each in self._unlike_values(unclear)}
        self.equal = len(names) - len(found)
        return [found[name] for name in names if name in found] + [
            Difference(name, "only in B", b=_shown(two, name))
            for name in (*two, *two.objects)
            if name not in one and name not in one.objects
        ]

    def _unlike_form(self, name: str) -> Difference | None:
        a, b = (side[name] for side in self._sides)
        if a.shape != b.shape:
            return Difference(name, "shape", str(list(a.shape)), str(list(b.shape)))
        if a.dtype != b.dtype:
            return Difference(name, "dtype", _dtype(a), _dtype(b))
        return None

    def _same_sums(self, name: str, numel: int) -> bool | None:
        """Returns whether the checksums of a name are equal; None: they cannot tell."""
        a, b = (sums.get(name, {}) for sums in self._sums)
        is_whole = bool(a) and sum(each.numel for each in a.values()) == numel
        if not is_whole or {k: v.form for k, v in a.items()} != {k: v.form for k, v in b.items()}:
            return None
        return {k: v.crc for k, v in a.items()} == {k: v.crc for k, v in b.items()}

    def _unlike_values(self, names: Sequence[str]) -> Iterator[Difference]:
        """Reads tensors of equal shapes; yields those that differ in a bit, or cannot be read."""
        batch: list[str] = []
        nbytes = 0
        for name in names:
            size = self._sides[0][name].nbytes
            if size > _PIECE_BYTES:
                yield from self._unlike_among([name], is_large=True)
                continue
            if nbytes + size > _PIECE_BYTES:
                yield from self._unlike_among(batch)
                batch, nbytes = [], 0
            batch.append(name)
            nbytes += size
        yield from self._unlike_among(batch)

    def _unlike_among(self, batch: list[str], *, is_large: bool = False) -> Iterator[Difference]:
        if not batch:
            return
        try:
            if is_large:
                unlike = [name for name in batch if not self._is_same_large(name)]
            else:
                a, b = (side.load_tensors(batch) for side in self._sides)
                unlike = [name for name in batch if not self._have_same_bits(a[name], b[name])]
        except (UnsafePickleError, UnsupportedError) as error:  # of one: a user's subclass, ...
            if len(batch) == 1:
                yield Difference(batch[0], "values", f"not read: {type(error).__name__}")
                return
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                yield from self._unlike_among(half)
            return
        yield from (Difference(name, "values") for name in unlike)

    def _is_same_large(self, name: str) -> bool:
        a, b = (side[name] for side in self._sides)
        for at, lengths in slabs(a.shape, a.dtype.itemsize, _PIECE_BYTES):
            index = tuple(slice(p, p + n) for p, n in zip(at, lengths, strict=True))
            if not self._have_same_bits(a[index], b[index]):
                return False
        return True

    def _have_same_bits(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        self.read_bytes += a.nbytes + b.nbytes
        return torch.equal(_bytes_of(a), _bytes_of(b))

    def _is_same_object(self, name: str) -> bool:
        """Compares decoded objects; those that cannot be decoded or compared count as different."""
        try:
            return _are_equal(*(side.objects[name] for side in self._sides))
        except (UnsafePickleError, UnsupportedError, RuntimeError):  # of torch; too deep
            return False


def _are_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        return is_alike and torch.equal(_bytes_of(a), _bytes_of(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return pickle.dumps(a) == pickle.dumps(b)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _shown(side: OpenCheckpoint, name: str) -> str:
    return f"{_dtype(side[name])} {list(side[name].shape)}" if name in side else "object"


def _dtype(tensor: LazyTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sums(path: Location, rank: int | None) -> dict[str, dict[Any, Sum]]:
    """Returns the checksums of all chunks, by name and offsets; not of stock's."""
    sums: dict[str, dict[Any, Sum]] = {}
    with open_contents(path) as (_, place, look, artifact):
        name = metadata_name(rank)
        if artifact is not None or look.size(name) is None:
            return sums
        files = read_commit(place, name).files
        job = place.verify_job(ReadOptions())
        for entry in (files or {}).values():
            facts = add_file(job, entry.path)
            if facts.tail is None or facts.tail.footer_crc != entry.footer_crc:
                continue  # damaged, or of another save: reading says so
            for row in facts.rows or ():
                sums.setdefault(row.fqn, {})[row.offsets] = _sum_of(row)
    return sums


def _sum_of(row: FooterRow) -> Sum:
    form: tuple[Any, ...] = (row.kind, row.sizes, row.strides, row.dtype, row.payload_bytes)
    if row.kind == TORCH_TENSOR:  # equal values may lie in unequal archives: these are read
        form = (*form, row.payload_crc)
    return Sum(form, math.prod(row.sizes), row.payload_crc)
