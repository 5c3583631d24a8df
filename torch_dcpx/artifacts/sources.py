"""The live source of an export: one rank writes each box, from its own shards. Stored ones:
`stored_source`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import add, sub
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
)
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_dcpx._compat import dtype_name, wanted_chunks, wanted_sizes
from torch_dcpx._globs import chosen_names, names_beneath, unmatched
from torch_dcpx._text import counted
from torch_dcpx.artifacts.layout import ExportTensor, file_view
from torch_dcpx.artifacts.rows import ExportRows, Target, narrowed
from torch_dcpx.checkpoint.stateful import with_state_dicts
from torch_dcpx.errors import PlanError, UnsupportedError
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.keys.wrappers import plain_names
from torch_dcpx.planners.state_errors import naming_state_errors
from torch_dcpx.tensors.memory import check_storage, has_strides, refuse_nested

Box = tuple[Sizes, Sizes]  # offsets and lengths, in elements


class Entry(NamedTuple):
    """A tensor of the source; an object has neither dtype nor sizes."""

    dtype: str | None = None
    sizes: Sizes | None = None


class Piece(NamedTuple):
    """A box of an offered tensor whose bytes follow each other in a file."""

    number: int
    offsets: Sizes
    lengths: Sizes


class Change(Protocol):
    """Changes a stored tensor on its way into the artifact."""

    def apply(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Changes a box of it, in place, which begins at these offsets."""


class Offer(NamedTuple):
    """The boxes of one tensor of the artifact that this rank holds."""

    name: str  # of that tensor
    boxes: tuple[Box, ...]
    twin: str | None  # the first name of the same memory, maybe its own; None: no bytes here


def selected(
    entries: Mapping[str, Entry], part: str, keys: Iterable[str] | None
) -> tuple[dict[str, Entry], str]:
    """Returns the chosen entries, and the prefix that their names lose. Raises: PlanError."""
    if keys is None:
        return {name: one for name, one in entries.items() if name.startswith(part)}, part
    for glob in unmatched(entries, keys):
        if why := names_beneath(glob, entries)[1]:
            raise PlanError(f"keys: {glob!r} {why}")
        near = difflib.get_close_matches(glob, list(entries)[:1000], 3) or list(entries)[:3]
        raise PlanError(
            f"keys: nothing is named {glob!r} among {counted(len(entries), 'name')}, such as "
            f"{', '.join(map(repr, near))}"
        )
    return {name: entries[name] for name in chosen_names(entries, keys)}, ""


class LiveSource:
    """A module or state dict, sharded or not."""

    is_shared = False  # a rank can write only the boxes that it holds
    slot_parts = 8  # sixteenths of the budget for slots; the others: copies of memory not plain
    piece_bytes = 0  # nothing is stored
    generation = None
    name = "a module or state dict"  # as ranks compare it

    def __init__(self, source: nn.Module | Mapping[str, Any]) -> None:
        if isinstance(source, nn.Module):
            modules, state = {"": source}, source.state_dict()
        else:
            modules = {str(k): one for k, one in source.items() if isinstance(one, nn.Module)}
            state = with_state_dicts(source)
        with naming_state_errors(state):
            self.state, paths = flatten_state_dict(state)
        self.plain = plain_names(modules, self.state)
        is_part = any(len(path) > 1 and path[0] == "model" for path in paths.values())
        self._part = "model." if is_part else ""
        self._memory: dict[tuple[int, Sizes], torch.Tensor] = {}
        self._tensors: Sequence[ExportTensor] = ()

    def entries(self) -> tuple[dict[str, Entry], str]:
        """Returns this rank's names, and the prefix of the model's. Raises: UnsupportedError."""
        found = {}
        for name, value in self.state.items():
            refuse_nested(name, value)
            sizes = wanted_sizes(value) if isinstance(value, torch.Tensor) else None
            found[name] = Entry() if sizes is None else Entry(dtype_name(value.dtype), sizes)
        return found, self._part

    def objects(self, names: Mapping[str, str], *, is_first: bool) -> dict[str, Any]:
        """Returns this rank's objects by new name; `names` maps new names to its own."""
        return {new: self.state[name] for new, name in names.items() if name in self.state}

    def offers(
        self, tensors: Sequence[ExportTensor], mapped: Mapping[str, MappedTensor]
    ) -> list[Offer]:
        """Returns this rank's boxes of each tensor. Raises: UnsupportedError."""
        self._tensors = tensors
        first: dict[Any, str] = {}
        offers = []
        for number, tensor in enumerate(tensors):
            boxes, memory = [], []
            for source in mapped[tensor.name].sources:
                for offsets, local in self._chunks(source):
                    for at, view in mapped[tensor.name].boxes_of(source, offsets, local):
                        if view.numel() == 0:
                            continue
                        boxes.append((at, tuple(view.shape)))
                        self._memory[number, at] = view
                        bits = (view.is_conj(), view.is_neg(), str(view.device))
                        memory.append((at, view.data_ptr(), view.shape, view.stride(), bits))
            key = (tensor.dtype, tuple(memory))
            twin = tensor.name if memory else None
            if memory and memory[0][1]:
                twin = first.setdefault(key, tensor.name)
            offers.append(Offer(tensor.name, tuple(boxes), twin))
        return offers

    def write(
        self, own: Sequence[tuple[int, Box]], targets: Mapping[int, Target], rows: ExportRows
    ) -> None:
        """Writes boxes: (number of the tensor, box)."""
        for number, (offsets, lengths) in own:
            tensor = self._tensors[number]
            place = narrowed(file_view(tensor), offsets, lengths)
            rows.add(self._memory[number, offsets], place, targets[number])
        rows.flush()

    def fill(self, pieces: Sequence[Piece], views: Sequence[torch.Tensor]) -> None:
        """Copies pieces of tensors that this rank holds whole to plain host memory."""
        for piece, view in zip(pieces, views, strict=True):
            for at, local in self._boxes_of[piece.number]:
                box = _common(piece, at, local.shape)
                if box is not None:
                    begin, lengths = box
                    there = narrowed(view, map(sub, begin, piece.offsets), lengths)
                    there.copy_(narrowed(local, map(sub, begin, at), lengths))

    @cached_property
    def _boxes_of(self) -> dict[int, list[tuple[Sizes, torch.Tensor]]]:
        found: dict[int, list[tuple[Sizes, torch.Tensor]]] = {}
        for (number, at), local in self._memory.items():
            found.setdefault(number, []).append((at, local))
        return found

    def _chunks(self, name: str) -> Iterable[tuple[Sizes, torch.Tensor]]:
        target = self.state.get(name)
        if target is None:  # another rank's
            return
        for index, chunk in enumerate(wanted_chunks(target)):
            place = MetadataIndex(name, chunk.offsets, index)
            local = find_state_dict_object({name: target}, place).detach()
            if local.is_meta:
                raise UnsupportedError(f"'{name}' is on meta: it has no bytes to export")
            if not has_strides(local):
                raise UnsupportedError(
                    f"'{name}' is a {type(local).__name__} of layout {local.layout}, which an "
                    "export cannot lay out"
                )
            check_storage(local, name)
            yield tuple(chunk.offsets), local


def _common(piece: Piece, at: Sizes, sizes: Sizes) -> Box | None:
    """Returns offsets and lengths of what a piece has in common with a box; None: nothing."""
    begins = tuple(map(max, piece.offsets, at))
    ends = map(min, map(add, piece.offsets, piece.lengths), map(add, at, sizes))
    lengths = tuple(map(sub, ends, begins))
    return (begins, lengths) if all(length > 0 for length in lengths) else None
