"""Tensors of checkpoints as numbers, in bounded memory: C++ looks at one slice after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torch_dcpx._native import _C
from torch_dcpx.artifacts.opened import LazyTensor
from torch_dcpx.artifacts.rows import slabs
from torch_dcpx.errors import UnsafePickleError, UnsupportedError
from torch_dcpx.views.objects import Tolerance

_PIECE_BYTES = 8 << 20  # of each side, in memory at one time
_MOST_NAMES = 1000  # of one read

_T = TypeVar("_T")


def dtype_text(dtype: torch.dtype) -> str:
    """Returns "float32"."""
    return str(dtype).removeprefix("torch.")


def form_text(tensor: LazyTensor) -> str:
    """Returns "float32 [20, 30]"."""
    return f"{dtype_text(tensor.dtype)} {list(tensor.shape)}"


def batches_of(names: Iterable[str], nbytes: Callable[[str], int]) -> Iterator[list[str]]:
    """Yields names that are read together; one whose bytes are too many comes alone."""
    batch: list[str] = []
    held = 0
    for name in names:
        size = nbytes(name)
        if batch and (held + size > _PIECE_BYTES or len(batch) == _MOST_NAMES):
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += size
    if batch:
        yield batch


def is_large(nbytes: int) -> bool:
    """Returns whether a tensor is read in slices."""
    return nbytes > _PIECE_BYTES


def read_each(
    names: Sequence[str], read: Callable[[Sequence[str]], Sequence[_T]]
) -> Iterator[tuple[str, _T | UnsafePickleError | UnsupportedError]]:
    """Yields what `read` gives of each name; of one that it refuses, the error.

    Raises: CorruptionError, StorageError: bytes are damaged, or cannot be read.
    """
    if not names:
        return
    try:
        found = read(names)
    except (UnsafePickleError, UnsupportedError) as error:  # of one: a user's class, ...
        if len(names) == 1:
            yield names[0], error
            return
        middle = len(names) // 2
        for half in (names[:middle], names[middle:]):
            yield from read_each(half, read)
    else:
        yield from zip(names, found, strict=True)


def slices_of(*tensors: LazyTensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yields the same slices of tensors of one shape, of a bounded number of bytes each."""
    width = max(tensor.dtype.itemsize for tensor in tensors)
    for at, lengths in slabs(tensors[0].shape, width, _PIECE_BYTES):
        index = tuple(slice(p, p + n) for p, n in zip(at, lengths, strict=True))
        yield tuple(tensor[index] for tensor in tensors)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


@dataclass
class Compared:
    """How the elements of two tensors of one shape differ, as far as they were added."""

    different: int = 0  # elements of other values; two NaNs are equal, -0.0 and 0.0 are
    beyond: int = 0  # of these, the ones outside of the tolerances
    is_same_bits: bool = True
    has_numbers: bool = True  # False: bytes alone were compared
    max_abs: float = 0.0
    norm: float = 0.0
    norm_a: float = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> None:
        """Adds two tensors in host memory."""
        count = a.numel()
        if not count:
            self.is_same_bits &= a.dtype == b.dtype
            return
        one, two = _plain(a), _plain(b)
        names = dtype_text(one.dtype), dtype_text(two.dtype)
        if not all(map(_C.has_numbers, names)):
            self._add_bytes(one, two)
            return
        found = _C.compare_values(
            names[0], one.data_ptr(), names[1], two.data_ptr(), count, *tolerance
        )
        self.different += found[0]
        self.beyond += found[1]
        self.is_same_bits &= found[2]
        either = self.max_abs, found[3]
        self.max_abs = math.nan if any(map(math.isnan, either)) else max(either)
        self.norm = math.hypot(self.norm, found[4])
        self.norm_a = math.hypot(self.norm_a, found[5])

    def _add_bytes(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.has_numbers = False
        unlike = a.numel()
        if a.dtype == b.dtype:
            unlike = _C.unlike_elements(a.data_ptr(), b.data_ptr(), unlike, a.itemsize)
        self.different += unlike
        self.beyond += unlike
        self.is_same_bits &= not unlike

    @property
    def rel(self) -> float:
        """|A - B| / |A|; inf where A is 0, and where an infinity differs; NaN where a NaN does."""
        if not math.isfinite(self.max_abs):
            return self.max_abs
        if not self.norm:
            return 0.0
        return self.norm / self.norm_a if self.norm_a else math.inf


@dataclass
class Summed:
    """Sums up the elements of a tensor, as far as they were added."""

    finite: int = 0
    nan: int = 0
    infinite: int = 0
    low: Any = None
    high: Any = None
    mean: float | None = None
    norm: float = 0.0

    def add(self, tensor: torch.Tensor) -> None:
        """Adds a tensor in host memory. Raises UnsupportedError: it has no numbers."""
        name = dtype_text(tensor.dtype)
        if not _C.has_numbers(name):
            raise UnsupportedError(f"elements of {name} are not numbers that can be summed")
        own = _plain(tensor)
        finite, nan, infinite, low, high, mean, norm = _C.value_statistics(
            name, own.data_ptr(), own.numel()
        )
        if mean is not None:
            share = finite / (self.finite + finite)
            self.mean = mean if self.mean is None else self.mean * (1 - share) + mean * share
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)
        self.finite += finite
        self.nan += nan
        self.infinite += infinite
        self.norm = math.hypot(self.norm, norm)
