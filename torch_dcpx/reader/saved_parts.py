"""Tensors in parts: what torch's HuggingFaceStorageWriter leaves before it consolidates.

Each rank has files `shard-00002-model-00001-of-00001.safetensors`, whose headers say where in its
tensor a part begins, but not how large the tensor is. So parts become tensors only where a folder
has each file of several ranks, and their parts leave no hole. A part by itself is refused: nothing
says that it is the whole. If the last ranks lack all files, that shows only in a folder `sharded`
beside what torch has made of it; elsewhere a warning says so.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple

from torch_dcpx._text import counted, printable
from torch_dcpx.errors import CorruptionError, UnsupportedError
from torch_dcpx.reader.safetensors_header import HeaderEntry
from torch_dcpx.tensors.tiling import box_text, untiled

logger = logging.getLogger("torch_dcpx")

SHARDED_NAME = "sharded"  # the folder of what torch has consolidated beside it
PARTS_NAME = "shard-*-model-*.safetensors"  # means all of them in a folder
_MAX_NAME = 160  # characters, in a message
_PART = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_WHOLE = re.compile(r"model-\d{5,9}-of-\d{5,9}\.safetensors")  # the same writer's, of one process
_WAY_OUT = (
    "put the files of all ranks, by their own names, in a folder and name that; if one process "
    "saved alone, call the file 'model-00001-of-00001.safetensors'"
)


class StoredTensor(NamedTuple):
    """The place of a tensor, or of a part of one."""

    file: str  # relative to the directory
    offset: int  # bytes from the start of the file
    entry: HeaderEntry

    @property
    def begin(self) -> tuple[int, ...]:
        """Offsets in the whole tensor, in elements."""
        return self.entry.saved_at or (0,) * len(self.entry.sizes)


def is_part_name(name: str) -> bool:
    """Whether torch's writer gives the name to a rank's file."""
    return _PART.fullmatch(name) is not None


def _shown(name: str) -> str:
    return printable(name)[:_MAX_NAME]


def sizes_of_parts(parts: Iterable[StoredTensor]) -> tuple[int, ...]:
    """Returns the sizes of the tensor that the parts make."""
    ends = [tuple(map(add, part.begin, part.entry.sizes)) for part in parts]
    return tuple(map(max, *ends)) if len(ends) > 1 else ends[0]


def refuse_parts(
    folder: str, file: str, tensors: Mapping[str, StoredTensor], *, is_of_index: bool = False
) -> None:
    """Raises UnsupportedError where a file that is read by itself holds, or may hold, parts."""
    for name, one in tensors.items():
        at = one.entry.saved_at
        if at is None or not (any(at) or is_part_name(file)):
            continue
        raise UnsupportedError(
            f"'{folder}/{file}' holds what one rank had of each tensor, of '{_shown(name)}' "
            f"{box_text(at, one.entry.sizes)} (torch's HuggingFaceStorageWriter, not "
            f"consolidated): name the folder '{folder}' with the files of all ranks"
        )
    is_noted = any(one.entry.saved_at is not None for one in tensors.values())
    if is_noted and not is_of_index and not _WHOLE.fullmatch(file):
        raise UnsupportedError(
            f"'{folder}/{file}' is of torch's HuggingFaceStorageWriter, and was renamed: whole "
            f"tensors and first parts look alike in it; {_WAY_OUT}"
        )


def assembled(
    folder: str,
    held: Mapping[str, Mapping[str, StoredTensor]],
    consolidated: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[StoredTensor, ...]]:
    """Returns the parts of each tensor, from the files of all ranks.

    Args:
        folder: path, for errors.
        held: tensors by file.
        consolidated: sizes of the tensors that torch has made of the files, if it has.

    Raises:
        UnsupportedError: the files are of one rank alone, or one may be missing.
        CorruptionError: parts leave a hole, overlap, or have several dtypes; they do not make what
            torch has made of them, or are of several saves.
    """
    numbers = {tuple(map(int, found.groups())) for found in map(_PART.fullmatch, held) if found}
    ranks = sorted({rank for rank, _, _ in numbers})
    if len(ranks) == 1:
        raise UnsupportedError(
            f"'{folder}' holds files of one rank, '{next(iter(held))}', and nothing says that "
            f"there were no others (torch's HuggingFaceStorageWriter, not consolidated); {_WAY_OUT}"
        )
    parts: dict[str, list[StoredTensor]] = {}
    for tensors in held.values():
        for name, one in tensors.items():
            parts.setdefault(name, []).append(one)
    found = {name: _without_empty(own) for name, own in parts.items()}
    _check(folder, found, ranks)
    sizes = {name: sizes_of_parts(own) for name, own in found.items()}
    for name, wanted in consolidated.items():
        if sizes.get(name) != wanted:
            raise CorruptionError(
                f"'{_shown(name)}' in '{folder}' has sizes {list(sizes.get(name, ()))}, where the "
                f"files that torch has made of these have {list(wanted)}: a file is missing, or "
                "they are of several saves",
                path=folder,
                fqn=name,
                touched=(),
            )
    if sizes.keys() != consolidated.keys():
        _check_grid(folder, numbers)
        logger.warning(
            "'%s': assembled %s of the files of %s; no file says if there were more ranks",
            folder,
            counted(len(found), "tensor"),
            counted(len(ranks), "rank"),
        )
    return found


def _check_grid(folder: str, numbers: set[tuple[int, ...]]) -> None:
    """Raises an error unless each rank has each file: a part at the beginning of a tensor looks
    like the whole where the files of the other parts are missing.
    """
    most = {of for _, _, of in numbers}
    if len(most) > 1:
        raise CorruptionError(
            f"'{folder}' holds files of ranks that are one of {min(most)}, and others that are one "
            f"of {max(most)}: they are of several saves",
            path=folder,
            touched=(),
        )
    (of,) = most
    ranks = max(rank for rank, _, _ in numbers)
    lacking = ranks * of - len(numbers)
    if not lacking:
        return
    names = (
        f"shard-{rank:05}-model-{at:05}-of-{of:05}.safetensors"
        for rank in range(1, ranks + 1)
        for at in range(1, of + 1)
        if (rank, at, of) not in numbers
    )
    more = f" and {counted(lacking - 1, 'other file')}" if lacking > 1 else ""
    raise UnsupportedError(
        f"'{folder}' lacks '{next(names)}'{more}: nothing says if it held a part of a tensor "
        "(torch's HuggingFaceStorageWriter, not consolidated); bring it, or if that rank had "
        "nothing for it, torch's HuggingFaceStorageReader takes what is there"
    )


def _without_empty(parts: Sequence[StoredTensor]) -> tuple[StoredTensor, ...]:
    """Returns the parts with elements; the first one where there is none."""
    return tuple(one for one in parts if 0 not in one.entry.sizes) or tuple(parts[:1])


def _check(folder: str, found: Mapping[str, Sequence[StoredTensor]], ranks: Sequence[int]) -> None:
    """Raises CorruptionError unless parts of one dtype fill each tensor once."""

    def fail(name: str, what: str) -> CorruptionError:
        return CorruptionError(
            f"the parts of '{_shown(name)}' in '{folder}', in files of "
            f"{counted(len(ranks), 'rank')} ({ranks[0]} to {ranks[-1]}), {what}: a file is "
            "missing, or they are of several saves",
            path=folder,
            fqn=name,
            touched=(),
        )

    names = list(found)
    for name, parts in found.items():
        if len({(one.entry.dtype, len(one.begin)) for one in parts}) > 1:
            raise fail(name, "have several dtypes or numbers of dimensions")
    boxes = [[(one.begin, one.entry.sizes) for one in found[name]] for name in names]
    wholes = [sizes_of_parts(found[name]) for name in names]
    for number, offence, box, _, point in untiled(zip(wholes, boxes, strict=True)):
        name = names[number]
        if offence == "hole":
            raise fail(name, f"lack element {list(point)} of {list(wholes[number])}")
        where = box_text(*boxes[number][box]) if box >= 0 else "all of it"
        raise fail(name, f"hold {where} of '{found[name][max(box, 0)].file}' twice")
