"""What is exported: names, dtypes and sizes of all ranks, and this rank's part of the bytes.

A live state is exported from where its shards lie: of what several ranks hold, one writes. For what
is stored see `export_stored`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_dcpx._compat import dtype_name, wanted_chunks, wanted_sizes
from torch_dcpx.artifacts.layout import ExportTensor, file_view
from torch_dcpx.artifacts.rows import ExportRows, Target
from torch_dcpx.checkpoint.stateful import with_state_dicts
from torch_dcpx.errors import PlanError, UnsupportedError
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.reader.generation import Generation
from torch_dcpx.tensors.memory import has_strides

Box = tuple[Sizes, Sizes]  # offsets and lengths, in elements


class Entry(NamedTuple):
    """A name of the source. Objects have neither dtype nor sizes."""

    dtype: str | None
    sizes: Sizes | None


class Offer(NamedTuple):
    """What this rank holds of one tensor of the artifact."""

    name: str  # of that tensor
    boxes: tuple[Box, ...]
    twin: str | None  # the first name of the same memory, its own too; None: no bytes here


class Source(Protocol):
    """Where the bytes come from."""

    is_shared: bool  # whether any rank can write any box
    slot_parts: int  # of sixteen of the budget, for the slots of those who write
    piece_bytes: int  # the most that is read at once of what is stored

    def entries(self) -> tuple[dict[str, Entry], str]:
        """Returns all names that this rank sees, and what begins those of the model."""

    def generation(self) -> Generation | None:
        """Returns which save of a stored checkpoint this rank reads."""

    def objects(self, names: Mapping[str, str], *, is_first: bool) -> dict[str, Any]:
        """Returns objects by new name, where `names` gives their own; `is_first`: on rank 0."""

    def offers(
        self, tensors: Sequence[ExportTensor], mapped: Mapping[str, MappedTensor]
    ) -> list[Offer]:
        """Returns what this rank holds of each tensor."""

    def write(
        self, own: Sequence[tuple[int, Box]], targets: Sequence[Target], rows: ExportRows
    ) -> None:
        """Writes boxes: (number of the tensor, box)."""


def selected(
    entries: Mapping[str, Entry], part: str, keys: Iterable[str] | None
) -> tuple[dict[str, Entry], str]:
    """Returns the entries that are meant, and what begins their names and is left out.

    Raises:
        PlanError: a glob matches nothing.
    """
    if keys is None:
        return {name: one for name, one in entries.items() if name.startswith(part)}, part
    chosen: dict[str, Entry] = {}
    for glob in keys:
        match = re.compile(fnmatch.translate(glob)).match
        found = {name: one for name, one in entries.items() if match(name)}
        if not found:
            raise PlanError(f"keys: nothing is named {glob!r} among {len(entries)} names")
        chosen |= found
    return {name: one for name, one in entries.items() if name in chosen}, ""


class LiveSource:
    """A module or state dict, sharded or not."""

    is_shared = False
    slot_parts = 8  # the others: copies of what is no plain memory
    piece_bytes = 0  # nothing is stored

    def __init__(self, source: nn.Module | Mapping[str, Any]) -> None:
        if isinstance(source, nn.Module):
            state: dict[str, Any] = source.state_dict()
        else:
            state = with_state_dicts(source)
        self.state, paths = flatten_state_dict(state)
        is_part = any(len(path) > 1 and path[0] == "model" for path in paths.values())
        self._part = "model." if is_part else ""
        self._memory: dict[tuple[int, Sizes], torch.Tensor] = {}
        self._tensors: Sequence[ExportTensor] = ()

    def entries(self) -> tuple[dict[str, Entry], str]:
        """Returns all names that this rank sees, and what begins those of the model."""
        found = {}
        for name, value in self.state.items():
            sizes = wanted_sizes(value) if isinstance(value, torch.Tensor) else None
            found[name] = (
                Entry(None, None) if sizes is None else Entry(dtype_name(value.dtype), sizes)
            )
        return found, self._part

    def generation(self) -> None:
        """Returns None: nothing is stored."""

    def objects(self, names: Mapping[str, str], *, is_first: bool) -> dict[str, Any]:
        """Returns objects by new name, where `names` gives their own; those that are here."""
        return {new: self.state[name] for new, name in names.items() if name in self.state}

    def offers(
        self, tensors: Sequence[ExportTensor], mapped: Mapping[str, MappedTensor]
    ) -> list[Offer]:
        """Returns what this rank holds of each tensor. Raises: UnsupportedError."""
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
            twin = first.setdefault(key, tensor.name) if memory and memory[0][1] else None
            twin = twin or (tensor.name if memory else None)
            offers.append(Offer(tensor.name, tuple(boxes), twin))
        return offers

    def write(
        self, own: Sequence[tuple[int, Box]], targets: Sequence[Target], rows: ExportRows
    ) -> None:
        """Writes boxes: (number of the tensor, box)."""
        for number, (offsets, lengths) in own:
            tensor = self._tensors[number]
            place = narrowed(file_view(tensor), offsets, lengths)
            rows.add(self._memory[number, offsets], place, targets[number], tensor.name)
        rows.flush()

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
            yield tuple(chunk.offsets), local


def narrowed(view: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    """Returns a box of a view."""
    for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
        view = view.narrow(dim, begin, length)
    return view
