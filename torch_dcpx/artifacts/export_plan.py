"""Who writes which box of an export, and where: what the coordinator decides for all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_dcpx.artifacts.layout import ExportTensor, is_held, is_name
from torch_dcpx.artifacts.sources import Box, Entry, Offer
from torch_dcpx.errors import CorruptionError, PlanError, UnsupportedError
from torch_dcpx.keys.mapped_tensor import MappedTensor
from torch_dcpx.keys.rules import KeyRules
from torch_dcpx.tensors.tiling import untiled

_MAX_SHOWN = 10


class RankPart(NamedTuple):
    """What a rank tells the coordinator of its part."""

    offers: list[Offer]  # of each tensor
    objects: dict[str, Any]  # by name, of a torch archive
    piece_bytes: int  # the most that it reads at once of what is stored
    renamed: bytes  # a digest of what functions made of the names; b"" without functions


def united(of_ranks: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Returns the names of all ranks. Raises: PlanError where ranks contradict each other."""
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
    entries: Mapping[str, Entry], part: str, key_map: KeyRules, *, is_safetensors: bool
) -> tuple[list[ExportTensor], dict[str, MappedTensor], list[str]]:
    """Returns tensors of the artifact, of what they are made, and names of objects.

    Raises:
        UnsupportedError: dtypes or names that safetensors cannot hold, with all of them.
        PlanError: the map does not fit.
    """
    mapped = key_map.resolve({name: entry.sizes for name, entry in entries.items()}, part=part)
    tensors, objects, refused = [], [], []
    for name, entry in mapped.items():
        if entry.sizes is None:
            objects.append(name)
            continue
        dtypes = {str(entries[source].dtype) for source in entry.sources}
        if len(dtypes) > 1:
            raise PlanError(f"'{name}' is merged of dtypes {sorted(dtypes)}", fqn=name)
        dtype = dtypes.pop() if dtypes else "float32"
        if is_safetensors and not is_held(dtype):
            refused.append(f"'{name}' ({dtype})")
        tensors.append(ExportTensor(name, dtype, entry.sizes))
    unheld = [repr(one.name) for one in tensors if is_safetensors and not is_name(one.name)]
    if unheld:
        raise UnsupportedError(
            f"safetensors cannot hold {len(unheld)} names: {_listed(unheld)}; rename them by "
            "key_map"
        )
    if refused:
        raise UnsupportedError(
            f"safetensors cannot hold {len(refused)} tensors: {_listed(refused)}; leave them out "
            "by keys, or use format='torch'"
        )
    return tensors, mapped, objects


def renamed_digest(
    mapped: Mapping[str, MappedTensor], tensors: Sequence[ExportTensor], objects: Sequence[str]
) -> bytes:
    """Returns a digest of the artifact's names, and of what each is made; equal where these are."""
    names = [*(tensor.name for tensor in tensors), *objects]
    text = repr([(name, mapped[name]) for name in names])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def check_same_tensors(tensors: Sequence[ExportTensor], parts: Sequence[RankPart]) -> None:
    """Raises PlanError unless the offers of all ranks are of these tensors, each of its own."""
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
    """Returns tensors with the names of the same memory as aliases of the first; those stay in the
    list, at their place, with the alias of None.
    """
    first: dict[str, str] = {}
    for number, tensor in enumerate(tensors):
        twins = {offers[number].twin for offers in of_ranks} - {None}
        if len(twins) == 1:
            first[tensor.name] = str(twins.pop())
    aliases: dict[str, list[str]] = {}
    for name, twin in first.items():
        if name != twin:
            aliases.setdefault(twin, []).append(name)
    return [tensor._replace(aliases=tuple(aliases.get(tensor.name, ()))) for tensor in tensors]


def assigned(
    tensors: Sequence[ExportTensor], of_ranks: Sequence[Sequence[Offer]]
) -> list[list[tuple[int, Box]]]:
    """Returns by rank the boxes that it writes: each once, by the rank with the least to do."""
    ranks: list[list[tuple[int, Box]]] = [[] for _ in of_ranks]
    loads = [0] * len(of_ranks)
    for number, tensor in enumerate(tensors):
        holders: dict[Box, list[int]] = {}
        for rank, offers in enumerate(of_ranks):
            for box in offers[number].boxes:
                holders.setdefault(box, []).append(rank)
        check_whole(tensor, list(holders))
        for box, able in holders.items():
            rank = min(able, key=loads.__getitem__)
            ranks[rank].append((number, box))
            loads[rank] += math.prod(box[1]) * tensor.itemsize
    return ranks


def check_whole(tensor: ExportTensor, boxes: Sequence[Box]) -> None:
    """Raises CorruptionError unless the boxes hold each element once."""
    for _, offence, first, second, point in untiled([(tensor.sizes, boxes)]):
        what = (
            f"no rank and no chunk holds element {list(point)}"
            if offence == "hole"
            else f"{offence} of boxes {first} and {second}"
        )
        raise CorruptionError(
            f"'{tensor.name}' of sizes {list(tensor.sizes)} cannot be exported: {what}",
            fqn=tensor.name,
        )


def refuse_objects(names: Sequence[str]) -> None:
    """Raises UnsupportedError for objects that were asked for by name."""
    if names:
        shown = _listed([repr(name) for name in names])
        raise UnsupportedError(f"safetensors cannot hold {len(names)} objects: {shown}")


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return ", ".join(texts[:_MAX_SHOWN]) + more


def _text(entry: Entry) -> str:
    return "an object" if entry.sizes is None else f"{entry.dtype} {list(entry.sizes)}"
