"""Equal copies of tensors that several ranks hold by their placement, and rows of them.

A DTensor that is replicated along a dimension of its mesh is equal along it; of a plain tensor that
ranks have under one name nobody knows. So a rank sends the coordinator 16 bytes that stand for its
large DTensors and their placements: ranks with the same bytes hold copies wherever they hold the
same chunk. Names on ranks with different bytes (two meshes, as of two stages of a pipeline) are
doubtful.

Where ranks share a tensor out by rows, the planner's state gets an object in its place, which gives
rows through the protocol by which DCP finds shards. So the planner's hooks stay stock's.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torch_dcpx.errors import PlanError
from torch_dcpx.ranks.plan_wire import RankPlan, names_hash
from torch_dcpx.tensors.memory import ChunkFinder, Part, is_plain_dtensor, is_plain_tensor
from torch_dcpx.writer.rows import SAVE_ROWS

_MIN_BYTES = 64 << 10  # kMinSplitBytes of csrc/plan/balance.h: what is smaller is never cut
_MAX_ITEM_BYTES = 16  # of an element: complex128


class Replicas(NamedTuple):
    """The copies that one rank knows of."""

    key: bytes  # 16; equal where names, meshes and placements of all large DTensors are
    unknown: frozenset[str]  # names of large tensors whose copies nobody calls equal
    names_hash: int  # of the items that this is of


def replicas_of(
    state: Mapping[str, Any],
    items: Sequence[WriteItem],
    chunks: ChunkFinder,
    whole: Collection[str],
) -> Replicas | None:
    """Returns what a rank knows; None where none of its DTensors has copies and is worth a cut.

    `chunks` has found the parts of all DTensors; `whole` are names of values without rows.
    """
    parts = chunks.found()
    if not any(
        _has_copies(mesh.shape, placements) and part.sizes.numel() * _MAX_ITEM_BYTES >= _MIN_BYTES
        for mesh, placements, part in parts
    ):
        return None
    places: dict[tuple[int, Any], str] = {}
    placed: list[str] = []
    unknown: list[str] = []
    for fqn, value in state.items():
        if fqn in whole:
            continue
        if is_plain_dtensor(value):
            # By the bytes of the whole tensor, which are the same on all ranks of a mesh.
            if not _is_large(value):
                continue
            spec = value._spec
            place = places.get((id(spec.mesh), spec.placements))
            if place is None:
                place = places[id(spec.mesh), spec.placements] = _describe(value)
            if place:
                placed.append(f"{fqn!r} {place}")
        elif is_plain_tensor(value) and _is_large(value):
            unknown.append(fqn)
    text = "\n".join(sorted(placed)).encode(errors="surrogatepass")
    key = hashlib.blake2b(text, digest_size=16).digest()
    return Replicas(key, frozenset(unknown), names_hash(items))


def doubtful_names(plans: Iterable[RankPlan]) -> set[str]:
    """Returns the names on ranks that know of different copies, of the ranks that may get rows."""
    # One plan of each kind: all of a kind have the same large DTensors.
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
    """Returns whether several ranks have each part; of Partial they have terms of a sum."""
    each = zip(mesh_shape, placements, strict=True)
    return any(count > 1 and place.is_replicate() for count, place in each)


def _is_large(tensor: Any) -> bool:
    return bool(tensor.shape.numel() * tensor.dtype.itemsize >= _MIN_BYTES)


def _describe(tensor: DTensor) -> str:
    """Returns a text of a tensor's mesh and placements, "" on a rank that has no part of it."""
    mesh = tensor._spec.mesh
    if mesh.get_coordinate() is None:
        return ""
    about = (mesh.device_type, mesh.mesh.tolist(), tensor._spec.placements)
    return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()


class RowPieces(torch.Tensor):
    """Stands for a tensor in a planner's state, and gives the rows of it that a save asks for."""

    rows: dict[tuple[int, ...], torch.Tensor]  # by where they begin in the whole tensor
    # Functions of it return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Returns the rows of an item.

        Raises:
            PlanError: rows that the plan did not ask for.
        """
        rows = self.rows.get(tuple(index.offset or ()))
        if rows is None:
            at = None if index.offset is None else list(index.offset)
            raise PlanError(
                f"rows of '{index.fqn}' at {at} are not in the plan of this rank, which has "
                f"{sorted(map(list, self.rows))}",
                fqn=index.fqn,
            )
        return rows

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Refuses to be planned: it would pass for the whole tensor."""
        raise PlanError(f"'{fqn}' is rows of an earlier plan, not a tensor of the state", fqn=fqn)

    def __deepcopy__(self, memo: dict[int, Any]) -> RowPieces:
        copied = copy.deepcopy(self.detach(), memo).as_subclass(RowPieces)
        # Views of one storage stay views of one copy of it.
        copied.rows = copy.deepcopy(self.rows, memo)
        memo[id(self)] = copied
        return copied


def with_pieces(
    state: Mapping[str, Any], items: Sequence[WriteItem], *, is_rare: bool = False
) -> dict[str, Any] | None:
    """Returns the state with `RowPieces` where items ask for rows; None where none do.

    Args:
        state: of the planner.
        items: of the final plan of this rank.
        is_rare: few items ask for rows, if any: C++ finds those of other sizes than the state's.

    Raises:
        PlanError: an item asks for rows that this rank does not have.
    """
    pieces: dict[str, RowPieces] = {}
    chunks, asking = ChunkFinder(), items
    if is_rare and isinstance(state, dict):
        asking = [items[number] for number in SAVE_ROWS.strangers(items, state)]
    for item in asking:
        if item.type is not WriteItemType.SHARD or item.tensor_data is None:
            continue
        fqn, chunk = item.index.fqn, item.tensor_data.chunk
        value: Any = state.get(fqn)
        if is_plain_tensor(value):
            own: Part | None = Part(torch.Size([0] * value.dim()), value.shape)
        elif is_plain_dtensor(value):
            own = chunks.part_of(value)
        else:
            continue  # never cut: `DcpxSavePlanner` says so to the coordinator
        if own is None or (chunk.offsets == own.offsets and chunk.sizes == own.sizes):
            continue
        begins = [at - begin for at, begin in zip(chunk.offsets, own.offsets, strict=False)]
        tensor = (value._local_tensor if type(value) is DTensor else value).detach()
        if not len(chunk.sizes) == len(chunk.offsets) == tensor.dim() or any(
            at < 0 or at + size > end
            for at, size, end in zip(begins, chunk.sizes, tensor.shape, strict=True)
        ):
            raise PlanError(
                f"the plan writes '{fqn}' at {list(chunk.offsets)} of {list(chunk.sizes)}, of "
                f"which this rank has {list(own.sizes)} at {list(own.offsets)}",
                fqn=fqn,
            )
        if fqn not in pieces:
            pieces[fqn] = tensor.as_subclass(RowPieces)
            pieces[fqn].rows = {}
        for dim, (at, size) in enumerate(zip(begins, chunk.sizes, strict=True)):
            tensor = tensor.narrow(dim, at, size)
        pieces[fqn].rows[tuple(chunk.offsets)] = tensor
    if pieces:
        _check_sizes(pieces, items)
    return {**state, **pieces} if pieces else None


def _check_sizes(pieces: Mapping[str, RowPieces], items: Sequence[WriteItem]) -> None:
    """Raises PlanError unless each item of a cut tensor finds rows of its sizes: two items begin at
    one row, or one asks for the whole tensor.
    """
    for item in items:
        fqn, about = item.index.fqn, item.tensor_data
        if fqn not in pieces or about is None:
            continue
        if pieces[fqn].__get_tensor_shard__(item.index).shape != about.chunk.sizes:
            raise PlanError(
                f"the plan writes '{fqn}' at {list(item.index.offset or ())} twice, in different "
                f"sizes, one of them {list(about.chunk.sizes)}",
                fqn=fqn,
            )
