"""Plans of earlier saves, by the fingerprint of the state that they were made of.

A plan that is kept holds no tensor and no value, so it is as right for what the state holds next as
it was before. Nothing is kept of a state without a fingerprint, of a planner with planning hooks of
its own, or of planning that failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx.planners.replicas import Replicas

MAX_PLANS = 4
MAX_ITEMS = 1_000_000  # of all plans, and chunks of their metadata: about 1 KiB each


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What the ranks of a group have agreed on, once planning had succeeded on this rank.

    Attributes:
        name: drawn by the coordinator: ranks that know one name know parts of one plan.
        plan: this rank's piece.
        compared: names of Python values that were equal on all ranks, sorted. The agreement is
            void where they are not.
        metadata: the coordinator's; nobody else's.
    """

    name: str
    plan: SavePlan
    compared: tuple[str, ...]
    metadata: Metadata | None

    @cached_property
    def weight(self) -> int:
        """Items of the piece, and chunks of the metadata; what has no chunks counts as one."""
        entries = self.metadata.state_dict_metadata.values() if self.metadata is not None else ()
        return len(self.plan.items) + sum(len(getattr(one, "chunks", ())) or 1 for one in entries)


@dataclasses.dataclass
class KnownPlan:
    """A local plan, and what became of it.

    Attributes:
        items: of the plan; never changed.
        whole_names: of what has no rows.
        replicas: what the rank knows of copies; None: nothing, or it is not asked.
        objects: names of Python values, in the state's order.
        agreement: None: there is none yet.
    """

    items: Sequence[Any]
    whole_names: frozenset[str]
    replicas: Replicas | None
    objects: tuple[str, ...]
    agreement: Agreement | None = None

    @property
    def weight(self) -> int:
        """Items, and what the agreement weighs."""
        return len(self.items) + (self.agreement.weight if self.agreement is not None else 0)


class PlanCache:
    """The plans used last: few, for each may be large."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, KnownPlan] = OrderedDict()

    def get(self, fingerprint: bytes) -> KnownPlan | None:
        """Returns the plan of a state with this fingerprint."""
        known = self._known.get(fingerprint)
        if known is not None:
            with contextlib.suppress(KeyError):  # another thread has dropped it since
                self._known.move_to_end(fingerprint)
        return known

    def keep(self, fingerprint: bytes, known: KnownPlan) -> None:
        """Keeps a plan, and drops those that were not used for longest beyond the bounds."""
        self._known.pop(fingerprint, None)
        self._known[fingerprint] = known
        self.trim()

    def trim(self) -> None:
        """Drops what is beyond the bounds, but never the plan used last."""
        plans = list(self._known.items())
        left = MAX_ITEMS
        for number, (fingerprint, known) in enumerate(reversed(plans)):
            left -= known.weight
            if number and (number >= MAX_PLANS or left < 0):
                self._known.pop(fingerprint, None)

    def clear(self) -> None:
        """Drops all plans."""
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


class Planning:
    """What a planner keeps from one save to the next. A copy, and a pickled one, has nothing.

    Attributes:
        is_enabled: whether anything is to be kept.
        plans: of earlier saves.
        group: (rank, ranks, which group of this process) of those who agree; None: who does is
            not known here.
        known: of the local plan made last; None: it is not kept.
        has_conflicts: whether Python values differed in the global plan made last.
    """

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.plans = PlanCache()
        self.group: tuple[int, int, str] | None = None
        self.known: KnownPlan | None = None
        self.handed: Sequence[Any] = ()  # items, of the plan that was handed out last
        self.has_conflicts = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (Planning, (self.is_enabled,))


def values_digest(digests: Mapping[str, bytes], names: Sequence[str]) -> bytes:
    """Returns 16 bytes that are equal where the digests of these values are.

    Args:
        digests: of a state's Python values, by name; a value of which nothing is known has none.
        names: of the values, in an order that is the same on all ranks.
    """
    whole = hashlib.blake2b(digest_size=16)
    for name in names:
        digest = digests.get(name, b"")
        whole.update(len(digest).to_bytes(1, "little") + digest)
    return whole.digest()
