"""Of which tensors the placement says that several ranks hold equal copies.

A DTensor that is replicated along a dimension of its mesh is equal along it; of a plain tensor that
ranks have under one name nobody knows. So a rank tells the coordinator, in 16 bytes, which large
DTensors it has, where: ranks that say the same hold copies wherever they hold the same chunk. Names
that ranks have which say something else (two meshes, as of two stages of a pipeline) are doubtful.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torch_dcpx.ranks.plan_wire import RankPlan, names_hash
from torch_dcpx.tensors.own_chunks import ChunkFinder, is_plain_dtensor, is_plain_tensor

_MIN_BYTES = 64 << 10  # kMinSplitBytes of csrc/plan/balance.h: what is smaller is never cut
_MAX_ITEM_BYTES = 16  # of an element: complex128


class Replicas(NamedTuple):
    """What one rank knows of copies."""

    key: bytes  # 16; equal where names, meshes and placements of all large DTensors are
    unknown: frozenset[str]  # names of large tensors whose copies nobody calls equal
    names_hash: int  # of the items that this is of


def replicas_of(
    state: Mapping[str, Any],
    items: Sequence[WriteItem],
    chunks: ChunkFinder,
    whole: Collection[str],
) -> Replicas | None:
    """Returns what a rank knows; None where no DTensor of it is worth a cut and has copies.

    Args:
        state: of the planner.
        items: of its plan.
        chunks: which has found the parts of all of its DTensors.
        whole: names of what has no rows, at which nobody need look.
    """
    parts = chunks.found()
    if not any(
        _has_copies(mesh.shape, placements) and part.sizes.numel() * _MAX_ITEM_BYTES >= _MIN_BYTES
        for mesh, placements, part in parts
    ):
        return None
    places: dict[tuple[int, Any], str] = {}
    told: list[str] = []
    unknown: list[str] = []
    for fqn, value in state.items():
        if fqn in whole:
            continue
        if is_plain_dtensor(value):
            # By the bytes of all of it: the ranks of a mesh then tell the same.
            if not _is_large(value):
                continue
            spec = value._spec
            place = places.get((id(spec.mesh), spec.placements))
            if place is None:
                place = places[id(spec.mesh), spec.placements] = _describe(value)
            if place:
                told.append(f"{fqn!r} {place}")
        elif is_plain_tensor(value) and _is_large(value):
            unknown.append(fqn)
    whole_text = "\n".join(sorted(told)).encode(errors="surrogatepass")
    key = hashlib.blake2b(whole_text, digest_size=16).digest()
    return Replicas(key, frozenset(unknown), names_hash(items))


def doubtful_names(plans: Iterable[RankPlan]) -> set[str]:
    """Returns the names that ranks have which know of different copies.

    One plan of each kind is looked at: all of a kind have the same large DTensors.

    Args:
        plans: of all ranks that may be given rows.
    """
    kinds = {plan.replicas: plan for plan in plans if plan.replicas}
    seen: set[str] = set()
    again: set[str] = set()
    if len(kinds) > 1:
        for plan in kinds.values():
            names = {item.index.fqn for item in plan.items}
            again |= names & seen
            seen |= names
    return again


def _has_copies(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> bool:
    """Returns whether a placement has each part on several ranks. One of Partial has terms of a
    sum instead; its tensor is never cut.
    """
    each = zip(mesh_shape, placements, strict=True)
    return any(count > 1 and place.is_replicate() for count, place in each)


def _is_large(tensor: Any) -> bool:
    return bool(tensor.shape.numel() * tensor.dtype.itemsize >= _MIN_BYTES)


def _describe(tensor: DTensor) -> str:
    """Returns what the ranks say of their parts of one tensor, "" on a rank that has none."""
    spec = tensor._spec
    if spec.mesh.get_coordinate() is None:
        return ""
    about = (spec.mesh.device_type, spec.mesh.mesh.tolist(), spec.placements)
    return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()
