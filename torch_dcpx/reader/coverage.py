"""Checks before a read that every element that a load wants is stored, and stored once.

Where the stored chunks leave a hole, stock keeps the tensor's old elements; where two chunks hold
one element, the one that is read last stays. Stock reports neither.

The check holds for plans that stock's planner makes of the state: a planner or reader that changes
the plan may want a part, or fill the rest its own way.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from torch_dcpx._compat import wanted_chunks
from torch_dcpx._hooks import PLAN_HOOKS, has_stock_hooks
from torch_dcpx.errors import CorruptionError, DcpxError, PlanError
from torch_dcpx.metadata.lazy import outline_of
from torch_dcpx.tensors.memory import ChunkFinder, is_plain_dtensor
from torch_dcpx.tensors.tiling import box_text, untiled, way_out

_Offence: TypeAlias = tuple[int, str, int, int, tuple[int, ...]]  # a row of `untiled`


class _Wanted(NamedTuple):
    """A chunk of the state, and the items that fill it."""

    fqn: str
    offsets: Sequence[int]  # in the whole tensor
    sizes: Sequence[int]
    items: Sequence[ReadItem]


def check_coverage(
    items: Sequence[ReadItem], planner: LoadPlanner, path: str, reader: str = "DcpxReader"
) -> bool:
    """Checks that the items fill every tensor of the planner's state exactly once.

    Args:
        items: the plan of this rank.
        planner: its state is loaded; one that plans its own way is believed.
        path: of the metadata, and `reader` the class of the reader, for errors.

    Returns:
        Whether it was checked; then no two items of one target meet.

    Raises:
        CorruptionError: the stored chunks leave a hole, or two hold the same element; no tensor was
            touched.
        PlanError: an item reaches outside of its target, or the shape of a DTensor's shard is not
            what its placement says.
    """
    if not has_stock_hooks(planner, PLAN_HOOKS):
        return False
    take_covered = getattr(planner, "_take_covered", None)  # DcpxLoadPlanner checks as it plans
    if take_covered is not None and take_covered(items):
        return True
    state: dict[str, Any] = planner.state_dict  # type: ignore[attr-defined]
    stored: Mapping[str, Any] = planner.metadata.state_dict_metadata  # type: ignore[attr-defined]
    check_shards(state, stored)
    outline = outline_of(stored)
    last = {item.dest_index.fqn: item for item in items}
    all_of: dict[str, list[ReadItem]] = {}
    if len(last) < len(items):
        for item in items:
            all_of.setdefault(item.dest_index.fqn, []).append(item)
    doubtful: dict[str, Sequence[ReadItem]] = {}
    for fqn, target in state.items():
        only = last.get(fqn)
        if only is None:
            own: Sequence[ReadItem] = ()
        else:
            own = all_of[fqn] if all_of else (only,)
            # An item of the target's own shape fills it: so it is for nearly all of a usual state.
            if only.lengths == getattr(target, "shape", None) and len(own) == 1:
                continue
        if isinstance(outline(fqn), TensorStorageMetadata):
            doubtful[fqn] = own
    if not doubtful:
        return True
    quick = [one for fqn, own in doubtful.items() for one in _quick(fqn, state[fqn], own)]
    exact = []
    for fqn in dict.fromkeys(quick[row[0]].fqn for row in _offences(quick)):
        entry: Any = outline(fqn)
        exact += _exact(fqn, state[fqn], doubtful[fqn], entry.size)
    for row in _offences(exact):
        raise _error(exact[row[0]], row, path, reader)
    return True


def check_shards(state: Mapping[str, Any], stored: Container[str]) -> None:
    """Raises PlanError if a shard of a DTensor that is `stored` has another shape than stock's
    planner plans for.
    """
    chunks = ChunkFinder()
    for fqn, target in state.items():
        if type(target) is DTensor and is_plain_dtensor(target) and fqn in stored:
            chunks.target_part_of(fqn, target)


def meeting_targets(items: Iterable[ReadItem]) -> frozenset[MetadataIndex]:
    """Returns the targets in which two items may fill one element: none in a plan of stock's."""
    parts_of: dict[MetadataIndex, list[ReadItem]] = {}
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            parts_of.setdefault(item.dest_index, []).append(item)
    meeting, targets, boxes = set(), [], []
    for target, parts in parts_of.items():
        ndims = {len(place) for part in parts for place in (part.dest_offsets, part.lengths)}
        if len(parts) > 1 and len(ndims) > 1:
            meeting.add(target)
        elif len(parts) > 1:
            ends = [map(add, part.dest_offsets, part.lengths) for part in parts]
            sizes = [max(0, *at) for at in zip(*ends, strict=True)]
            targets.append(target)
            boxes.append(_Wanted(target.fqn, (), sizes, parts))
    meeting.update(targets[row[0]] for row in _offences(boxes) if row[1] != "hole")
    return frozenset(meeting)


def _quick(fqn: str, target: Any, items: Sequence[ReadItem]) -> list[_Wanted]:
    """Returns `_exact` without DTensor's costly arithmetic; its chunks may be larger."""
    if type(target) is not DTensor or type(target._local_tensor) is not torch.Tensor:
        return _exact(fqn, target, items, None)
    return [_Wanted(fqn, (), target._local_tensor.shape, items)]


def _exact(
    fqn: str, target: Any, items: Sequence[ReadItem], whole: Sequence[int] | None
) -> list[_Wanted]:
    """Returns the chunks that a planner wants of `target`, cut at the end of the `whole` tensor."""
    wanted = []
    for number, chunk in enumerate(wanted_chunks(target)):
        sizes: Sequence[int] = chunk.sizes
        if whole is not None and len(whole) == len(sizes):  # no rank stores padding
            ends = zip(chunk.offsets, chunk.sizes, whole, strict=True)
            sizes = [max(0, min(size, end - offset)) for offset, size, end in ends]
        own = [item for item in items if item.dest_index.index == number]
        wanted.append(_Wanted(fqn, chunk.offsets, sizes, own))
    return wanted


def _offences(wanted: Sequence[_Wanted]) -> list[_Offence]:
    """Returns `untiled` of the chunks and their items.

    Raises: PlanError: an item has another number of dimensions than its chunk.
    """
    for number, one in enumerate(wanted):
        for box, item in enumerate(one.items):
            if not len(item.dest_offsets) == len(item.lengths) == len(one.sizes):
                raise _error(one, (number, "outside", box, -1, ()), "", "")
    return untiled(
        (one.sizes, [(item.dest_offsets, item.lengths) for item in one.items]) for one in wanted
    )


def _error(one: _Wanted, row: _Offence, path: str, reader: str) -> DcpxError:
    _, offence, box, other, point = row
    where = f"'{one.fqn}', of which {box_text(one.offsets, one.sizes)} is wanted"
    if offence == "hole":
        at = list(map(add, one.offsets, point))
        message = f"the metadata in '{path}' names no stored chunk with element {at} of {where}"
    elif offence == "overlap":
        a, b = (
            f"{box_text(item.dest_offsets, item.lengths)} from the chunk at "
            f"{list(item.storage_index.offset or ())}"
            for item in (one.items[box], one.items[other])
        )
        message = f"the metadata in '{path}' stores elements of {where} twice: {a}, and {b}"
    else:
        item = one.items[box] if box >= 0 else None
        place = box_text(item.dest_offsets, item.lengths) if item is not None else "a region"
        return PlanError(f"the plan reads {place} into a chunk of {where}", fqn=one.fqn)
    message = f"{message}; {way_out(offence, reader)}"
    return CorruptionError(message, fqn=one.fqn, path=path, touched=())
