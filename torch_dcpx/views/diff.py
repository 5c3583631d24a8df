"""`dcpx.diff`: how two checkpoints differ: names, shapes, dtypes, then values.

Values are read, and compared with their checksums on the way (of stock's archives before): what is
damaged is an error, on both sides alike, too. With `quick` recorded checksums are compared where
both checkpoints cut a tensor alike; the others are read. Tensors are read in slices of a bounded
number of bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_dcpx._arguments import check_bool
from torch_dcpx._text import counted, human_bytes
from torch_dcpx.artifacts.opened import OpenCheckpoint, open_checkpoint
from torch_dcpx.errors import OptionError, UnsafePickleError, UnsupportedError, must_be
from torch_dcpx.options import ReadOptions
from torch_dcpx.views.chosen import chosen
from torch_dcpx.views.objects import Tolerance, first_difference, short
from torch_dcpx.views.recorded import Recorded, check_foreign, same_sums
from torch_dcpx.views.tables import Shown, Table
from torch_dcpx.views.values import (
    Compared,
    batches_of,
    dtype_text,
    form_text,
    is_large,
    read_each,
    slices_of,
)

EQUAL = "equal"


@dataclass(frozen=True)
class NameDiff:
    """How one name differs. Of a tensor `a` and `b` are dtype and shape, and the value of one with
    one element; of an object a short text of the value, or of its first part that differs.

    Attributes:
        what: "equal", "only in A", "only in B", "kind" (a tensor here, an object there), "shape",
            "dtype", "values", or "bits": equal numbers of other bytes, which are -0.0 and 0.0, and
            NaN of other bits.
        elements: of the tensor; None of an object, and where shapes differ.
        different: elements of other values; None: not counted. Two NaNs are equal.
        beyond: of these, the ones outside of the tolerances.
        max_abs: greatest |a - b|; nan where one side alone is NaN. None: not computed.
        rel: |a - b| / |a|, norms over all elements; inf where |a| is 0.
        note: why values were not compared, or how.
    """

    name: str
    what: str
    a: str = ""
    b: str = ""
    elements: int | None = None
    different: int | None = None
    beyond: int | None = None
    max_abs: float | None = None
    rel: float | None = None
    note: str = ""
    bytes_a: int = 0  # of a tensor
    bytes_b: int = 0


@dataclass(frozen=True, repr=False)
class DiffReport(Shown[NameDiff]):
    """How checkpoint B differs from A. Iterates over the differences.

    Attributes:
        names: all that were compared, A's in their order, then those of B alone.
        is_quick: recorded checksums were compared where both sides have them.
        read_bytes: of values, of both sides.
        within: equal names whose values differ, but within the tolerances.
        by_sums: names told by recorded checksums.
        has_checksums: whether both sides have some: safetensors have none.
    """

    a: str
    b: str
    names: tuple[NameDiff, ...]
    read_bytes: int
    is_quick: bool = False
    rtol: float = 0.0
    atol: float = 0.0
    within: int = 0
    by_sums: int = 0
    has_checksums: bool = True

    @property
    def differences(self) -> tuple[NameDiff, ...]:
        """The names that differ."""
        return tuple(one for one in self.names if one.what != EQUAL)

    @property
    def equal(self) -> int:
        """The number of equal names."""
        return sum(one.what == EQUAL for one in self.names)

    @property
    def is_equal(self) -> bool:
        """Whether no name differs."""
        return self.equal == len(self.names)

    def each(self) -> Sequence[NameDiff]:
        return self.differences

    def head(self) -> str:
        """Returns counts, and how values were compared."""
        more = f" ({self.within} within the tolerances)" if self.within else ""
        found = f"{counted(len(self.names) - self.equal, 'difference')}, "
        found += f"{counted(self.equal, 'equal name')}{more}"
        read = f"read {human_bytes(self.read_bytes)}"
        proof = "; `dcpx verify` proves the bytes" if self.is_quick else ""
        if not self.has_checksums:
            proof = "; safetensors have no checksums: damage that both sides share does not show"
        if not self.by_sums:
            why = ", for which no checksums are compared" if self.is_quick else ""
            return f"{found}; {read} of values{why}{proof}"
        found = f"{found}, by recorded checksums{proof}"
        return f"{found}; {read} that these cannot tell" if self.read_bytes else found

    def table(self) -> Table:
        """Returns a row for each name that differs."""
        columns = ["difference", "A", "B", "#different", "#max abs", "#relative", "name"]
        return Table(columns, [_row(one) for one in self.differences])


def _row(one: NameDiff) -> tuple[str, ...]:
    counts = "" if one.different is None else f"{one.different:,} of {one.elements:,}"
    numbers = ("" if each is None else f"{each:.3g}" for each in (one.max_abs, one.rel))
    what = f"{one.what} ({one.note})" if one.note else one.what
    return what, one.a, one.b, counts, *numbers, one.name


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    keys: str | Iterable[str] | None = None,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    quick: bool = False,
    rank: int | None = None,
    options: ReadOptions | None = None,
) -> DiffReport:
    """Compares two checkpoints name by name, in bounded memory.

        print(dcpx.diff("ckpt/step-100", "ckpt/step-200", "model.*", rtol=1e-5))

    Args:
        a, b: as `open_checkpoint`.
        keys: names, or globs of names, as of `load_tensors`; objects count, too. Default None: all.
        rtol, atol: values are equal if |a - b| <= atol + rtol * |b|, as of `torch.isclose`: those
            of tensors, and floats in objects. Default 0: equal bits alone.
        quick: compare recorded checksums, which proves nothing about the bytes: `verify` does.
            What both sides do not cut alike is read. Default False: read all values, and compare
            them with their checksums.
        rank, options: as `open_checkpoint`.

    Returns:
        The report: `report.is_equal`, `report.differences`. What needs a class that no reader makes
        is compared by its stored bytes.

    Raises:
        UnknownNameError: a key means no name of either side.
        CorruptionError: bytes of one side are not what was written there.
        OptionError, NotCommittedError, StorageError, UnsupportedError: as `open_checkpoint`.
    """
    tolerance = Tolerance(_checked("rtol", rtol), _checked("atol", atol))
    check_bool("quick", quick)
    if quick and tolerance:
        wrong = "quick compares checksums, which know no tolerances: leave out quick, or rtol, atol"
        raise OptionError(wrong, option="quick", value=quick)
    with (
        open_checkpoint(a, options, rank=rank) as one,
        open_checkpoint(b, options, rank=rank) as two,
    ):
        run = _Run(one, two, tolerance, Recorded(a, rank), Recorded(b, rank))
        every = dict.fromkeys((*one, *one.objects, *two, *two.objects))
        wanted = chosen(every, keys, one.path, two.path)
        for path, side in ((a, one), (b, two)):
            if not (quick or side.is_of_ours):
                check_foreign(path, wanted, options or ReadOptions())
        names = tuple(run.compared(wanted, is_quick=quick))
        has_sums = one.has_checksums and two.has_checksums
    facts = run.read_bytes, quick, *tolerance, run.within, run.by_sums, has_sums
    return DiffReport(os.fspath(a), os.fspath(b), names, *facts)


def _checked(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value >= 0):
        raise must_be(name, value, "a number from 0 on")
    return float(value)


class _Run:
    """One comparison. Not thread-safe."""

    def __init__(
        self,
        one: OpenCheckpoint,
        two: OpenCheckpoint,
        tolerance: Tolerance,
        *recorded: Recorded,
    ) -> None:
        self._sides = one, two
        for side in self._sides:
            side.check_claims()
        self._tolerance = tolerance
        self._recorded = recorded
        self.read_bytes = 0
        self.within = 0
        self.by_sums = 0

    def compared(self, names: Sequence[str], *, is_quick: bool) -> Iterator[NameDiff]:
        """Yields how each name differs, in the order of the names."""
        found: dict[str, NameDiff] = {}
        told: dict[str, str] = {}  # by names, forms and checksums
        tensors: list[str] = []
        objects: list[str] = []
        for name in names:
            what = self._told(name, is_quick=is_quick)
            if what is not None:
                told[name] = what
            else:
                (tensors if name in self._sides[0] else objects).append(name)
        texts = [self._texts(side, told, is_quick=is_quick) for side in self._sides]
        for name, what in told.items():
            found[name] = self._named(name, what, [side[name] for side in texts])
        found |= {each.name: each for each in self._tensors(tensors)}
        found |= {each.name: each for each in self._objects(objects)}
        return (found[name] for name in names)

    def _told(self, name: str, *, is_quick: bool) -> str | None:
        """Returns how a name differs without a look at values; None: read it."""
        one, two = self._sides
        is_in = [name in side or name in side.objects for side in self._sides]
        if not all(is_in):
            return "only in A" if is_in[0] else "only in B"
        if (name in one) != (name in two):
            return "kind"
        if name in one and one[name].shape != two[name].shape:
            return "shape"
        if not is_quick:
            return None
        if name in one and one[name].dtype != two[name].dtype:
            return "dtype"
        same = self._told_by_sums(name)
        self.by_sums += same is not None
        return None if same is None else EQUAL if same else "values"

    def _told_by_sums(self, name: str) -> bool | None:
        """Returns whether a name is equal by checksums; None: read it."""
        is_tensor = name in self._sides[0]
        numel = math.prod(self._sides[0][name].shape) if is_tensor else 1
        same = same_sums(name, numel, *self._recorded)
        return same if same or is_tensor else None  # equal objects may be pickled in two ways

    # ---- Forms -----------------------------------------------------------------------------------

    def _named(self, name: str, what: str, texts: Sequence[str], **facts: Any) -> NameDiff:
        bytes_a, bytes_b = self._nbytes(name)
        a, b = texts
        return NameDiff(name, what, a, b, bytes_a=bytes_a, bytes_b=bytes_b, **facts)

    def _nbytes(self, name: str) -> list[int]:
        return [side[name].nbytes if name in side else 0 for side in self._sides]

    def _texts(
        self, side: OpenCheckpoint, names: Iterable[str], *, is_quick: bool
    ) -> dict[str, str]:
        """Returns forms of tensors and short values of objects; "" of what a side lacks."""
        texts = {name: form_text(side[name]) if name in side else "" for name in names}
        objects = [name for name in names if name in side.objects]
        if is_quick:
            return texts | dict.fromkeys(objects, "object")
        for batch in batches_of(objects, side.object_bytes):
            for name, value in read_each(batch, side.load_objects):
                is_refused = isinstance(value, (UnsafePickleError, UnsupportedError))
                texts[name] = f"object ({type(value).__name__})" if is_refused else short(value)
        return texts

    # ---- Tensors ---------------------------------------------------------------------------------

    def _tensors(self, names: Sequence[str]) -> Iterator[NameDiff]:
        """Reads tensors of equal shapes."""

        def nbytes(name: str) -> int:
            return max(self._nbytes(name))

        for batch in batches_of(names, nbytes):
            read = self._sliced if is_large(nbytes(batch[0])) else self._whole
            for name, found in read_each(batch, read):
                if isinstance(found, Exception):
                    yield self._by_bytes(name, found)
                else:
                    yield self._tensor(name, *found)

    def _whole(self, names: Sequence[str]) -> list[tuple[Compared, list[str]]]:
        a, b = (side.load_tensors(names) for side in self._sides)
        found = []
        for name in names:
            compared = Compared()
            self._add(compared, a[name], b[name])
            is_one = a[name].numel() == 1 and compared.has_numbers
            found.append((compared, [str(each[name].item()) for each in (a, b)] if is_one else []))
        return found

    def _sliced(self, names: Sequence[str]) -> list[tuple[Compared, list[str]]]:
        compared = Compared()
        for a, b in slices_of(*(side[names[0]] for side in self._sides)):
            self._add(compared, a, b)
        return [(compared, [])]

    def _add(self, compared: Compared, a: Any, b: Any) -> None:
        self.read_bytes += a.nbytes + b.nbytes
        compared.add(a, b, self._tolerance)

    def _tensor(self, name: str, compared: Compared, values: list[str]) -> NameDiff:
        a, b = (side[name] for side in self._sides)
        what = EQUAL
        if a.dtype != b.dtype:
            what = "dtype"
        elif self._tolerance:
            what = "values" if compared.beyond else EQUAL
            self.within += not compared.beyond and not compared.is_same_bits
        elif not compared.is_same_bits:
            what = "values" if compared.different else "bits"
        texts = [form_text(a), form_text(b)]
        if values and what != EQUAL:
            texts = [f"{form} {value}" for form, value in zip(texts, values, strict=True)]
        has_numbers = compared.has_numbers
        return self._named(
            name,
            what,
            texts,
            elements=math.prod(a.shape),
            different=compared.different,
            beyond=compared.beyond,
            max_abs=compared.max_abs if has_numbers else None,
            rel=compared.rel if has_numbers else None,
            note="" if has_numbers else f"by bytes: {dtype_text(a.dtype)} is no number an element",
        )

    # ---- Objects ---------------------------------------------------------------------------------

    def _objects(self, names: Sequence[str]) -> Iterator[NameDiff]:
        def nbytes(name: str) -> int:
            return max(side.object_bytes(name) for side in self._sides)

        def read(batch: Sequence[str]) -> list[tuple[Any, Any]]:
            a, b = (side.load_objects(batch) for side in self._sides)
            return list(zip(a, b, strict=True))

        for batch in batches_of(names, nbytes):
            for name, found in read_each(batch, read):
                if isinstance(found, Exception):
                    yield self._by_bytes(name, found)
                else:
                    yield self._object(name, *found)

    def _object(self, name: str, a: Any, b: Any) -> NameDiff:
        try:
            place = first_difference(a, b, self._tolerance)
            self.within += place is None and bool(first_difference(a, b, Tolerance()))
        except RuntimeError as error:  # of torch; too deep
            return NameDiff(name, "values", short(a), short(b), note=type(error).__name__)
        if place is None:
            return NameDiff(name, EQUAL, short(a), short(a))
        lead = f"{place.path}: " if place.path else ""
        a_text, b_text = (f"{lead}{text}" if text else "" for text in (place.a, place.b))
        return NameDiff(name, "values", a_text, b_text)

    def _by_bytes(self, name: str, why: Exception) -> NameDiff:
        """Compares the stored bytes of what no reader makes, such as a quantized tensor."""
        a, b = (recorded.digest(name) for recorded in self._recorded)
        for one in (a, b):
            self.read_bytes += sum(nbytes for _, nbytes, _ in one or ())
        texts = [
            form_text(side[name]) if name in side else f"object ({type(why).__name__})"
            for side in self._sides
        ]
        is_same = a is not None and a == b
        what = EQUAL if is_same else "values"
        note = f"by stored bytes: {type(why).__name__}"
        return self._named(name, what, texts, note=note)
