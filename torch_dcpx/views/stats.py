"""`dcpx.stats`: what the numbers of a checkpoint's tensors are, read in bounded memory."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from torch_dcpx._globs import chosen_names, unmatched
from torch_dcpx._text import counted
from torch_dcpx.artifacts.opened import OpenCheckpoint, open_checkpoint
from torch_dcpx.errors import UnknownNameError
from torch_dcpx.options import ReadOptions
from torch_dcpx.reader.hints import command
from torch_dcpx.views.chosen import chosen, globs_of
from torch_dcpx.views.recorded import check_foreign
from torch_dcpx.views.tables import Shown, Table
from torch_dcpx.views.values import Summed, batches_of, dtype_text, is_large, read_each, slices_of


@dataclass(frozen=True)
class TensorStats:
    """The numbers of one tensor. `min`, `max`, `mean` and `norm` are of its finite elements; None:
    there are none, or they are complex, which have a norm alone.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    min: int | float | None = None
    max: int | float | None = None
    mean: float | None = None
    norm: float | None = None
    nan: int | None = None
    infinite: int | None = None
    note: str = ""  # why it was not read


@dataclass(frozen=True)
class StatsReport(Shown):
    """The numbers of a checkpoint's tensors, in the order in which they are stored."""

    path: str
    tensors: tuple[TensorStats, ...]

    def head(self) -> str:
        """Returns counts of tensors, elements, NaN and infinities."""
        elements = sum(one.elements for one in self.tensors)
        nan = sum(one.nan or 0 for one in self.tensors)
        infinite = sum(one.infinite or 0 for one in self.tensors)
        unread = sum(bool(one.note) for one in self.tensors)
        more = f"; {counted(unread, 'tensor')} not read" if unread else ""
        return (
            f"{counted(len(self.tensors), 'tensor')}, {counted(elements, 'element')}: {nan:,} NaN, "
            f"{counted(infinite, 'infinity', 'infinities')}{more}"
        )

    def table(self) -> Table:
        """Returns a row for each tensor."""
        columns = ["dtype", "shape", "#min", "#max", "#mean", "#norm", "#NaN", "#inf", "name"]
        return Table(columns, [_row(one) for one in self.tensors])


def _row(one: TensorStats) -> tuple[str, ...]:
    numbers = (one.min, one.max, one.mean, one.norm)
    texts = (
        "" if each is None else f"{each}" if isinstance(each, int) else f"{each:.4g}"
        for each in numbers
    )
    counts = ("" if each is None else f"{each:,}" for each in (one.nan, one.infinite))
    name = f"{one.name} ({one.note})" if one.note else one.name
    return one.dtype, str(list(one.shape)), *texts, *counts, name


def stats(
    path: str | os.PathLike[str],
    keys: str | Iterable[str] | None = None,
    *,
    rank: int | None = None,
    options: ReadOptions | None = None,
) -> StatsReport:
    """Reads tensors, and computes minimum, maximum, mean and norm, and counts NaN and infinities.

        print(dcpx.stats("ckpt/step-100", "model.*"))

    Args:
        path, rank, options: as `open_checkpoint`.
        keys: names, or globs of names, as of `load_tensors`. Default None: all tensors.

    Returns:
        The report: `report.tensors`. Sums are those of doubles; integers' minimum and maximum are
        exact. A tensor whose elements are no numbers, or that no reader makes, has a note.

    Raises:
        UnknownNameError: a key means no tensor.
        CorruptionError: bytes are not what was written.
        OptionError, NotCommittedError, StorageError, UnsupportedError: as `open_checkpoint`.
    """
    with open_checkpoint(path, options, rank=rank) as checkpoint:
        _refuse_objects(checkpoint, keys)
        names = chosen(checkpoint, keys, checkpoint.path)
        if not checkpoint.is_of_ours:
            check_foreign(path, names, options or ReadOptions())
        return StatsReport(os.fspath(path), tuple(_tensors(checkpoint, names)))


def _refuse_objects(checkpoint: OpenCheckpoint, keys: str | Iterable[str] | None) -> None:
    """Raises UnknownNameError where a key means objects alone."""
    path, objects = checkpoint.path, checkpoint.objects
    for glob in unmatched(checkpoint, globs_of(keys) or ()):
        found = chosen_names(objects, (glob,)) or [n for n in objects if n.startswith(f"{glob}.")]
        if found:
            kind = "is an object" if glob in objects else "means objects alone"
            way = command("cat", path).removesuffix("`") + f" {shlex.quote(glob)}`"
            wrong = f"'{path}': {glob!r} {kind}, and stats are of tensors: see {way}"
            raise UnknownNameError(wrong, fqn=glob, path=path, nearest=tuple(found[:1]))


def _tensors(checkpoint: OpenCheckpoint, names: Sequence[str]) -> Iterator[TensorStats]:
    def whole(batch: Sequence[str]) -> list[Summed]:
        tensors = checkpoint.load_tensors(batch)
        return [_summed([(tensors[name],)]) for name in batch]

    def sliced(batch: Sequence[str]) -> list[Summed]:
        return [_summed(slices_of(checkpoint[batch[0]]))]

    for batch in batches_of(names, lambda name: checkpoint[name].nbytes):
        read = sliced if is_large(checkpoint[batch[0]].nbytes) else whole
        for name, found in read_each(batch, read):
            tensor = checkpoint[name]
            form = dtype_text(tensor.dtype), tuple(tensor.shape), math.prod(tensor.shape)
            if isinstance(found, Exception):
                yield TensorStats(name, *form, note=f"not read: {type(found).__name__}")
                continue
            numbers = found.low, found.high, found.mean, found.norm
            yield TensorStats(name, *form, *numbers, found.nan, found.infinite)


def _summed(parts: Iterable[tuple[torch.Tensor, ...]]) -> Summed:
    found = Summed()
    for (part,) in parts:
        found.add(part)
    return found
