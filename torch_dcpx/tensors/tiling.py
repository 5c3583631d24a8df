"""Do boxes hold each element of a tensor exactly once? C++ finds where not; words are here."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_dcpx._native import _C

_Box = tuple[Sequence[int], Sequence[int]]  # offsets and lengths in elements


def way_out(offence: str, reader: str, *, is_ours: bool = True) -> str:
    """Returns the end of an error: who read, what may have happened, and what loads such metadata.

    Args:
        offence: "hole" or "overlap".
        reader: class of the storage reader that was used; "" if it is not known.
        is_ours: whether that reader refuses such metadata, too, with any planner. Default True.
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
        of the box that it meets, an element in the hole).
    """
    columns = [array("q") for _ in range(5)]
    ndims, sizes, counts, offsets, lengths = columns
    for whole, boxes in tensors:
        ndims.append(len(whole))
        sizes.extend(whole)
        counts.append(len(boxes))
        for box in boxes:
            offsets.extend(box[0])
            lengths.extend(box[1])
    return _C.check_coverage(*columns)


def box_text(offsets: Iterable[int], lengths: Iterable[int]) -> str:
    """Returns a box as Python's slices: "[0:2, 4:8]"."""
    return "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(offsets, lengths, strict=False)) + "]"


def offence_text(
    entries: Mapping[str, Any],
    fqn: str,
    offence: str,
    chunk: int,
    other: int,
    point: tuple[int, ...],
) -> str:
    """Returns the error of one entry in the form of stock's planner; arguments as in `untiled`."""
    entry = entries[fqn]
    if offence == "outside":
        return (
            f"key:{fqn} has out of bounds chunk: tensor-size:{entry.size} chunk: "
            f"{entry.chunks[chunk]}"
        )
    if offence == "overlap":
        return f"key:{fqn} has overlapping chunks: {entry.chunks[other]} {entry.chunks[chunk]}"
    if offence == "hole":
        return (
            f"key:{fqn} invalid fill tensor-volume: no chunk holds element {list(point)} of "
            f"tensor-size:{entry.size}"
        )
    if offence == "too large":
        return f"key:{fqn} has 2**63 elements or more: tensor-size:{entry.size}"
    return f"key:{fqn} has chunks of other dimensions than tensor-size:{entry.size}"
