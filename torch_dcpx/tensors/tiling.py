"""Do boxes hold each element of a tensor exactly once? C++ checks; the texts are here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_dcpx._native import _C

_Box = tuple[Sequence[int], Sequence[int]]  # offsets and lengths in elements


def way_out(offence: str, reader: str, *, is_ours: bool = True) -> str:
    """Returns the end of an error of a hole or overlap: the reader's class, if it is known, a
    likely cause, and what loads such metadata. `is_ours`: that reader refuses it with any planner.
    """
    used = f"read by {reader}: " if reader else ""
    cause = "the directory may hold two saves; " if offence == "overlap" else ""
    other = "FileSystemReader" if is_ours else f"this {reader}"
    return f"{used}{cause}torch's DefaultLoadPlanner with {other} loads what there is"


def untiled(
    tensors: Iterable[tuple[Sequence[int], Sequence[_Box]]],
) -> list[tuple[int, str, int, int, tuple[int, ...]]]:
    """Returns the first offence of each tensor that its boxes do not hold exactly once.

    Args:
        tensors: sizes and boxes of each, all of the same number of dimensions.

    Returns:
        (number of the tensor, "hole", "overlap", "outside" or "too large", number of a box, number
        of the box that it overlaps, an element in the hole).
    """
    columns = [array("q") for _ in range(5)]
    ndims, sizes, counts, offsets, lengths = columns
    for whole, boxes in tensors:
        ndims.append(len(whole))
        sizes.extend(whole)
        counts.append(len(boxes))
        for box_offsets, box_lengths in boxes:
            offsets.extend(box_offsets)
            lengths.extend(box_lengths)
    return _C.check_coverage(*columns)


def box_text(offsets: Iterable[int], lengths: Iterable[int]) -> str:
    """Returns a box as Python's slices: "[0:2, 4:8]"."""
    return "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(offsets, lengths, strict=False)) + "]"


def offence_text(
    entries: Mapping[str, Any], fqn: str, offence: str, chunk: int, other: int, point: Sequence[int]
) -> str:
    """Returns the error of one entry in the form of stock's planner; arguments as in `untiled`."""
    entry = entries[fqn]
    size = f"tensor-size:{entry.size}"
    if offence == "outside":
        text = f"has out of bounds chunk: {size} chunk: {entry.chunks[chunk]}"
    elif offence == "overlap":
        text = f"has overlapping chunks: {entry.chunks[other]} {entry.chunks[chunk]}"
    elif offence == "hole":
        text = f"invalid fill tensor-volume: no chunk holds element {list(point)} of {size}"
    elif offence == "too large":
        text = f"has 2**63 elements or more: {size}"
    else:
        text = f"has chunks of other dimensions than {size}"
    return f"key:{fqn} {text}"
