"""Rows of a tensor that this rank writes, where several ranks hold all of it.

What a planner's state has for such a tensor is then an object that gives the rows that it is asked
for, through the protocol by which DCP finds shards. So the planner's hooks stay stock's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_dcpx.errors import PlanError
from torch_dcpx.tensors.own_chunks import ChunkFinder, Part, is_plain_dtensor, is_plain_tensor
from torch_dcpx.writer.save_rows import SAVE_ROWS


class RowPieces(torch.Tensor):
    """A tensor of which rows are asked for. Of no use but to be saved."""

    rows: dict[tuple[int, ...], torch.Tensor]  # by where they begin in the whole tensor
    # What is computed of it is a plain tensor.
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
        is_rare: few items ask for rows, if any: only those are looked at whose sizes are not those
            of what the state has, which C++ finds.

    Raises:
        PlanError: an item asks for what this rank does not have.
    """
    pieces: dict[str, RowPieces] = {}
    chunks = ChunkFinder()
    shard = WriteItemType.SHARD
    asking = items
    if is_rare and isinstance(state, dict):
        asking = [items[number] for number in SAVE_ROWS.strangers(items, state)]
    for item in asking:
        if item.type is not shard or item.tensor_data is None:
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


def cut_names(state: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the `RowPieces` of a state."""
    return frozenset(fqn for fqn, value in state.items() if type(value) is RowPieces)


def _check_sizes(pieces: Mapping[str, RowPieces], items: Sequence[WriteItem]) -> None:
    """Checks that each item of a tensor that is cut finds rows of its sizes.

    Raises:
        PlanError: two items begin at one row, or one asks for the whole tensor.
    """
    for item in items:
        cut = pieces.get(item.index.fqn)
        if cut is None or item.tensor_data is None:
            continue
        sizes = item.tensor_data.chunk.sizes
        if cut.__get_tensor_shard__(item.index).shape != sizes:
            raise PlanError(
                f"the plan writes '{item.index.fqn}' at {list(item.index.offset or ())} twice, "
                f"in different sizes, one of them {list(sizes)}",
                fqn=item.index.fqn,
            )
