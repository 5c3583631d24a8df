"""Ranks of an export agree on the source's names, the artifact's tensors, their boxes."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch_dcpx._compat import dtype_by_name
from torch_dcpx._text import counted
from torch_dcpx.artifacts.arguments import ExportArguments, check_same_export
from torch_dcpx.artifacts.layout import ExportTensor, is_name, is_quantized
from torch_dcpx.artifacts.sources import Box, Entry, Offer
from torch_dcpx.checkpoint.same_call import Call
from torch_dcpx.errors import CorruptionError, OptionError, PlanError, UnsupportedError
from torch_dcpx.keys.mapped_tensor import MappedTensor
from torch_dcpx.keys.wrappers import MODULE
from torch_dcpx.reader.generation import Generation, check_same_generation
from torch_dcpx.reader.safetensors_header import DTYPE_CODES
from torch_dcpx.tensors.tiling import untiled

logger = logging.getLogger("torch_dcpx")

_MAX_SHOWN = 10  # names in an error


class Names(NamedTuple):
    """A rank's call, and its names of the source."""

    entries: dict[str, Entry]
    part: str
    generation: Generation | None
    call: Call
    plain: Mapping[str, str] = MappingProxyType({})  # without wrappers, as the source's modules say


def agreed_names(of_ranks: list[Names]) -> tuple[dict[str, Entry], str, dict[str, str]]:
    """Returns the names of all ranks, the prefix of the model's, and `Names.plain` of all.

    Raises:
        PlanError: ranks make different calls, or contradict each other.
        StorageError: they see different saves of one checkpoint.
    """
    check_same_export([own.call for own in of_ranks])
    check_same_generation(own.generation for own in of_ranks)
    parts = {own.part: rank for rank, own in enumerate(of_ranks) if own.entries}
    if len(parts) > 1:
        (first, rank), (other, another) = sorted(parts.items())[:2]
        raise PlanError(
            f"export: tensors of rank {another} lie under {other!r}, those of rank {rank} under "
            f"{first or 'no part'!r}: give states of one form on all ranks; nothing was written"
        )
    plain = dict(pair for own in reversed(of_ranks) for pair in own.plain.items())
    return united(own.entries for own in of_ranks), max(parts, default=""), plain


def tell_kept(names: Iterable[str]) -> None:
    """Logs that names keep the component of a wrapper, or of a submodule: no module is at hand."""
    if all(name.startswith(f"{MODULE}.") for name in names):
        logger.warning(
            "export: every name begins with '%s.', as those of DDP do, and keeps it: "
            "key_map=KeyMap(wrappers=True) leaves it out, for the command --unwrap",
            MODULE,
        )


class RankPart(NamedTuple):
    """A rank's part of the artifact, as the coordinator gets it."""

    offers: list[Offer]  # of each tensor
    objects: dict[str, Any]  # by name, of a torch archive
    piece_bytes: int  # the most that it reads at once of a stored source
    renamed: bytes  # a digest of the names that functions made; b"" without functions


def united(of_ranks: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Returns the names of all ranks. Raises: PlanError if ranks contradict each other."""
    entries: dict[str, Entry] = {}
    for rank, own in enumerate(of_ranks):
        for name, entry in own.items():
            if entries.setdefault(name, entry) != entry:
                raise PlanError(
                    f"'{name}' is {_text(entry)} on rank {rank} and {_text(entries[name])} on one "
                    "before",
                    fqn=name,
                )
    return entries


def tensors_of(
    entries: Mapping[str, Entry],
    part: str,
    plain: Mapping[str, str],
    arguments: ExportArguments,
) -> tuple[list[ExportTensor], dict[str, MappedTensor], list[str]]:
    """Returns the artifact's tensors, the source's pieces of each, and the names of objects.

    Raises:
        UnsupportedError: the format cannot hold names, dtypes, or objects that `keys` chose.
        PlanError: the map does not fit, or the artifact would be empty.
    """
    sizes = {name: entry.sizes for name, entry in entries.items()}
    mapped = arguments.key_map.resolve(sizes, part=part, plain=plain)
    tensors, objects = [], []
    for name, entry in mapped.items():
        if entry.sizes is None:
            objects.append(name)
            continue
        dtypes = {_exported(str(entries[source].dtype), arguments) for source in entry.sources}
        if len(dtypes) > 1:
            raise PlanError(f"'{name}' is merged of dtypes {sorted(dtypes)}", fqn=name)
        tensors.append(ExportTensor(name, dtypes.pop(), entry.sizes))
    _check_held(tensors, objects, arguments)
    return tensors, mapped, objects


def _exported(stored: str, arguments: ExportArguments) -> str:
    """Returns the dtype in the artifact of a source's tensor, by torch's names."""
    dtype = dtype_by_name(stored)
    is_floating = dtype is not None and dtype.is_floating_point
    return arguments.dtype if is_floating and arguments.dtype is not None else stored


def _check_held(
    tensors: Sequence[ExportTensor], objects: Sequence[str], arguments: ExportArguments
) -> None:
    is_torch = arguments.is_torch
    names = [repr(one.name) for one in tensors if not is_torch and not is_name(one.name)]
    if names:
        raise UnsupportedError(
            f"safetensors cannot hold {counted(len(names), 'name')}: {_listed(names)}; rename them "
            "by key_map"
        )
    noted = [repr(one.name) for one in tensors if one.name in arguments.notes]
    if noted:
        raise OptionError(
            f"metadata has {counted(len(noted), 'tensor name')}, {_listed(noted)}, which the "
            "header keeps for tied weights",
            option="metadata",
            value=arguments.notes,
        )
    refused = [
        f"'{one.name}' ({one.dtype})"
        for one in tensors
        if is_quantized(one.dtype) or (not is_torch and one.dtype not in DTYPE_CODES)
    ]
    if refused:
        has_quantized = any(is_quantized(tensor.dtype) for tensor in tensors)
        raise UnsupportedError(
            f"{'a torch archive' if is_torch else 'safetensors'} cannot hold "
            f"{counted(len(refused), 'tensor')}: {_listed(refused)}; leave them out by keys, or "
            + ("export what dequantize() gives" if has_quantized else "use format='torch'")
        )
    if objects and arguments.keys is not None and not is_torch:
        shown = _listed([repr(name) for name in objects])
        raise UnsupportedError(
            f"safetensors cannot hold {counted(len(objects), 'object')}: {shown}; leave them out "
            "by keys, or use format='torch'"
        )
    if not tensors and not (is_torch and objects):
        skipped, way = "", "keys= names what to export"
        if objects:
            skipped = f", but {counted(len(objects), 'object')}, which safetensors cannot hold"
            way = "format='torch' keeps objects, too"
        raise PlanError(
            f"export: there is no tensor to export{skipped}; nothing was written; {way}"
        )


def renamed_digest(
    mapped: Mapping[str, MappedTensor], tensors: Sequence[ExportTensor], objects: Sequence[str]
) -> bytes:
    """Returns a digest of the artifact's names and of the pieces of each."""
    names = [*(tensor.name for tensor in tensors), *objects]
    text = repr([(name, mapped[name]) for name in names])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def check_same_tensors(tensors: Sequence[ExportTensor], parts: Sequence[RankPart]) -> None:
    """Raises PlanError unless all ranks offer these tensors, made of the same pieces."""
    names = [tensor.name for tensor in tensors]
    for rank, part in enumerate(parts):
        offered = [offer.name for offer in part.offers]
        if offered == names and part.renamed == parts[0].renamed:
            continue
        pairs = zip(offered, names, strict=False)
        differing = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if differing is not None:
            what = f"'{differing[0]}' where rank 0 has '{differing[1]}'"
        elif len(offered) != len(names):
            what = f"{len(offered)} tensors where rank 0 has {len(names)}"
        else:
            what = "the same names as rank 0, of other tensors or objects"
        raise PlanError(
            f"export: rank {rank} makes {what}: functions in key_map must return the same on every "
            "rank; nothing was written",
            fqn=None if differing is None else differing[0],
        )


def tied(
    tensors: Sequence[ExportTensor], of_ranks: Sequence[Sequence[Offer]]
) -> list[ExportTensor]:
    """Returns the tensors: of those with one memory, the first has the others as aliases.

    An alias keeps its place in the list.
    """
    aliases: dict[str | None, list[str]] = {}
    for number, tensor in enumerate(tensors):
        twins = {offers[number].twin for offers in of_ranks} - {None}
        if len(twins) == 1 and tensor.name not in twins:
            aliases.setdefault(twins.pop(), []).append(tensor.name)
    return [tensor._replace(aliases=tuple(aliases.get(tensor.name, ()))) for tensor in tensors]


def assigned(
    tensors: Sequence[ExportTensor], of_ranks: Sequence[Sequence[Offer]]
) -> list[list[tuple[int, Box]]]:
    """Returns the boxes of each rank: the rank with the least to write takes the next box."""
    ranks: list[list[tuple[int, Box]]] = [[] for _ in of_ranks]
    loads = [0] * len(of_ranks)
    for number, tensor in enumerate(tensors):
        holders: dict[Box, list[int]] = {}
        for rank, offers in enumerate(of_ranks):
            for box in offers[number].boxes:
                holders.setdefault(box, []).append(rank)
        _check_whole(tensor, list(holders))
        for box, able in holders.items():
            rank = min(able, key=loads.__getitem__)
            ranks[rank].append((number, box))
            loads[rank] += math.prod(box[1]) * tensor.itemsize
    return ranks


def _check_whole(tensor: ExportTensor, boxes: Sequence[Box]) -> None:
    """Raises CorruptionError unless the boxes hold each element once."""
    for _, offence, first, second, point in untiled([(tensor.sizes, boxes)]):
        what = f"{offence} of boxes {first} and {second}"
        if offence == "hole":
            what = f"no rank and no chunk holds element {list(point)}"
        raise CorruptionError(
            f"'{tensor.name}' of sizes {list(tensor.sizes)} cannot be exported: {what}",
            fqn=tensor.name,
        )


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return ", ".join(texts[:_MAX_SHOWN]) + more


def _text(entry: Entry) -> str:
    return "an object" if entry.sizes is None else f"{entry.dtype} {list(entry.sizes)}"
