"""Plans and results of a save as they travel between the ranks: columns instead of objects.

A pickle of DCP's dataclasses costs 15 us an item and its unpickling 39, on the coordinator for the
items of all ranks. Here C++ puts names, sizes and chunks into tables, and pickle takes the rest:
items of other classes, properties. The plan that comes out is equal to the one that went in.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._compat import HAS_KNOWN_ITEMS
from torch_dcpx._gc import paused_gc
from torch_dcpx._plan_classes import MAKER
from torch_dcpx.errors import PlanError

_MIN_DEFLATED = 512  # bytes: below, a compressor's setup is not worth it
_DIGEST_BYTES = 8


@dataclasses.dataclass(frozen=True, eq=False)
class WirePlan(SavePlan):
    """A SavePlan whose pickle holds columns; equal to a SavePlan of its fields.

    A subclass is pickled as any dataclass is, unless `_BLANKS` names it.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) and type(other) is not SavePlan:
            return NotImplemented
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # as of any SavePlan: its items are a list

    def __copy__(self) -> WirePlan:
        return dataclasses.replace(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        blank = _BLANKS.get(type(self))
        is_known = blank is not None and vars(self).keys() == blank.keys()
        if not HAS_KNOWN_ITEMS or not is_known or type(self.items) is not list:
            return super().__reduce_ex__(protocol)
        names, beside = self._beside()
        paths = beside.get("planner_data")
        with paused_gc():  # reading an object's attributes may make a dict of them
            message, properties, others, has_paths = MAKER.pack_plan(self.items, paths, names)
        if has_paths:
            del beside["planner_data"]
        data, nbytes = _deflated(message)
        return _unpacked, (type(self), data, nbytes, properties, others, beside)

    def _beside(self) -> tuple[list[str], dict[str, Any]]:
        """Returns names for the table of names, and the fields but the items: for `_whole`."""
        blank = _BLANKS[type(self)]
        beside = {name: value for name, value in vars(self).items() if value is not blank[name]}
        beside.pop("items")
        return [], beside

    @classmethod
    def _whole(cls, items: list[Any], _names: list[str], beside: dict[str, Any]) -> WirePlan:
        return cls(items, **beside)


@dataclasses.dataclass(frozen=True, eq=False)
class RankPlan(WirePlan):
    """The plan of a rank of `DcpxSavePlanner`, to the coordinator and back."""

    can_split: bool = False  # whether this rank can write rows of its tensors
    whole_names: frozenset[str] = frozenset()  # of tensors of which it cannot
    replicas: bytes = b""  # `Replicas.key`: of these alone, once a writer says that it keeps rows
    names_hash: int = 0  # of the items that `replicas` is of; of this process alone
    digests: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # of Python values
    is_shared: bool = False  # whether nobody changes a chunk or properties of one item alone
    has_paths: bool = False  # whether this rank takes `planner_data` from its planner
    sent_paths: Any = None  # the coordinator's: the rank has these, so they are not sent back
    cut_names: frozenset[str] | None = None  # of tensors of which it writes rows, once it knows

    def planned(self, items: list[Any]) -> RankPlan:
        """Returns the coordinator's answer: with `items`, without what the coordinator needs."""
        return dataclasses.replace(
            self,
            items=items,
            whole_names=frozenset(),
            replicas=b"",
            digests={},
            sent_paths=self.planner_data if self.has_paths else None,
        )

    def _beside(self) -> tuple[list[str], dict[str, Any]]:
        names, beside = super()._beside()
        if beside.pop("sent_paths", None) is self.planner_data:
            beside.pop("planner_data", None)
        beside.pop("digests", None)
        beside.pop("names_hash", None)
        whole, digests = list(self.whole_names), dict(self.digests)
        has_sums = all(type(s) is bytes and len(s) == _DIGEST_BYTES for s in digests.values())
        if has_sums and set(map(type, (*whole, *digests))) <= {str}:
            beside.pop("whole_names", None)
            names = [*whole, *digests]
            beside["sums"] = b"".join(digests.values())
        else:
            beside["digests"] = digests
        return names, beside

    @classmethod
    def _whole(cls, items: list[Any], names: list[str], beside: dict[str, Any]) -> RankPlan:
        sums = beside.pop("sums", None)
        if sums is not None:
            first = len(names) - len(sums) // _DIGEST_BYTES
            parts = [sums[at : at + _DIGEST_BYTES] for at in range(0, len(sums), _DIGEST_BYTES)]
            beside["whole_names"] = frozenset(names[:first])
            beside["digests"] = dict(zip(names[first:], parts, strict=True))
        return cls(items, **beside)


# The fields of the classes that are packed: `_beside` and the constructor know all of them.
_BLANKS = {kind: vars(kind([])) for kind in (WirePlan, RankPlan)}


def travelling(plan: SavePlan) -> SavePlan:
    """Returns a plan of torch's own class as one that is packed, if there are other ranks; any
    other plan as it is.
    """
    dist = torch.distributed
    if type(plan) is not SavePlan or not (dist.is_available() and dist.is_initialized()):
        return plan
    is_known = HAS_KNOWN_ITEMS and vars(plan).keys() == _BLANKS[WirePlan].keys()
    return WirePlan(**vars(plan)) if is_known and dist.get_world_size() > 1 else plan


def offered(plan: SavePlan) -> SavePlan:
    """Returns a rank's plan, for a writer that keeps several chunks of a name.

    A plan to which somebody has added items, or removed or renamed some, is written whole: its
    fields describe the planner's names, and other ranks rely on them.
    """
    if isinstance(plan, RankPlan) and plan.replicas and plan.names_hash == names_hash(plan.items):
        return dataclasses.replace(plan, can_split=True, names_hash=0)
    return travelling(plan)


def names_hash(items: Iterable[WriteItem]) -> int:
    """Returns the hash of the set of the items' names, for this process alone."""
    return hash(frozenset(item.index.fqn for item in items))


def _unpacked(
    kind: type[WirePlan],
    data: bytes,
    nbytes: int,
    properties: list[Any],
    others: list[Any],
    beside: dict[str, Any],
) -> WirePlan:
    """Returns the plan that was packed. Raises PlanError if the message is damaged."""
    is_shared = bool(beside.get("is_shared"))  # of a RankPlan; else parts are each item's own
    with paused_gc():
        message = _inflated(data, nbytes)
        items, paths, names = MAKER.unpack_plan(message, properties, others, is_shared)
    own = {"planner_data": paths} if paths is not None else {}
    return kind._whole(items, names, {**beside, **own})


def pack_results(results: Iterable[WriteResult]) -> tuple[Any, ...]:
    """Returns what `unpack_results` takes."""
    listed = list(results)
    if not HAS_KNOWN_ITEMS:
        return b"", -1, listed
    with paused_gc():
        message, others = MAKER.pack_results(listed)
    return *_deflated(message), others


def unpack_results(data: bytes, nbytes: int, others: list[Any]) -> list[WriteResult]:
    """Returns the results that were packed. Raises PlanError if the message is damaged."""
    if nbytes < 0:
        return others
    with paused_gc():
        return MAKER.unpack_results(_inflated(data, nbytes), others)


def _deflated(message: bytes) -> tuple[bytes, int]:
    """Returns a message deflated and its size before; a short one as it is, and 0."""
    if len(message) < _MIN_DEFLATED:
        return message, 0
    return zlib.compress(message, 1), len(message)


def _inflated(data: bytes, nbytes: int) -> bytes:
    if nbytes == 0:
        return data
    try:
        inflater = zlib.decompressobj()
        message = inflater.decompress(data, nbytes + 1)  # one more: to see its end
    except zlib.error as error:
        raise PlanError(f"a plan as a rank sent it is damaged: {error}") from error
    if len(message) != nbytes or not inflater.eof:
        raise PlanError(f"a plan as a rank sent it is damaged: {len(message)} of {nbytes} B")
    return message
