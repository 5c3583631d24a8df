"""Plans of earlier saves, by the fingerprint of the state that they were made of.

A kept plan holds no tensor and no value, so it also suits the state's next values. Nothing is kept
of a state without a fingerprint, of a planner with planning hooks of its own, or of planning that
failed.

A fingerprint holds all that decides on a plan, and nothing else: equal fingerprints, equal plans.
C++ reads the attributes of a state's tensors, without torch's dispatcher; Python describes rare
values. A value that plans itself (a ShardedTensor, a tensor of another class, an object with
`__create_write_items__`) leaves its state without a fingerprint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from torch_dcpx._compat import HAS_STRIDES
from torch_dcpx._native import _C
from torch_dcpx.planners.replicas import Replicas
from torch_dcpx.planners.state_errors import naming_state_errors
from torch_dcpx.tensors.memory import HOOKS

MAX_PLANS = 4
MAX_ITEMS = 1_000_000  # of all plans, and chunks of their metadata: about 1 KiB each


@dataclasses.dataclass(frozen=True)
class Agreement:
    """A plan on which the ranks of a group agreed; kept once planning succeeded on this rank."""

    name: str  # drawn by the coordinator: ranks that know one name know parts of one plan
    plan: SavePlan  # this rank's piece
    # Sorted names of Python values that were equal on all ranks: once they differ, it is void.
    compared: tuple[str, ...]
    metadata: Metadata | None  # the coordinator's; nobody else's
    contents: Any = None  # what tells that tensors are still equal; None: nothing does

    @cached_property
    def weight(self) -> int:
        """Items of the piece, and chunks of the metadata; what has no chunks counts as one."""
        entries = self.metadata.state_dict_metadata.values() if self.metadata is not None else ()
        return len(self.plan.items) + sum(len(getattr(one, "chunks", ())) or 1 for one in entries)


@dataclasses.dataclass
class KnownPlan:
    """A local plan, and what became of it."""

    items: Sequence[Any]  # never changed
    whole_names: frozenset[str]  # of values without rows
    replicas: Replicas | None  # None: no known copies, or none are asked for
    objects: tuple[str, ...]  # names of Python values, in the state's order
    agreement: Agreement | None = None

    @property
    def weight(self) -> int:
        """Items, and the agreement's weight."""
        return len(self.items) + (self.agreement.weight if self.agreement is not None else 0)


class PlanCache:
    """The plans used last: few, for each may be large."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, KnownPlan] = OrderedDict()

    def get(self, fingerprint: bytes) -> KnownPlan | None:
        known = self._known.get(fingerprint)
        if known is not None:
            with contextlib.suppress(KeyError):  # another thread has dropped it since
                self._known.move_to_end(fingerprint)
        return known

    def keep(self, fingerprint: bytes, known: KnownPlan) -> None:
        """Keeps a plan, and drops the least recently used ones beyond the bounds."""
        self._known.pop(fingerprint, None)
        self._known[fingerprint] = known
        self.trim()

    def trim(self) -> None:
        """Drops plans beyond the bounds, but never the plan used last."""
        left = MAX_ITEMS
        for number, (fingerprint, known) in enumerate(reversed(list(self._known.items()))):
            left -= known.weight
            if number and (number >= MAX_PLANS or left < 0):
                self._known.pop(fingerprint, None)

    def clear(self) -> None:
        self._known.clear()

    def __len__(self) -> int:
        return len(self._known)


class Planning:
    """The plans that a planner keeps from one save to the next. A copy or a pickle has none."""

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.plans = PlanCache()
        # Those who agree: (rank, ranks, which group of this process); None: not known here.
        self.group: tuple[int, int, str] | None = None
        self.known: KnownPlan | None = None  # the local plan made last, if it is kept
        self.handed: Sequence[Any] = ()  # items, of the plan that was handed out last
        self.has_conflicts = False  # Python values differed in the global plan made last
        self.lowest_names: frozenset[str] = frozenset()  # of tensors that differ over the ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return (Planning, (self.is_enabled,))


def values_digest(digests: Mapping[str, bytes], names: Sequence[str]) -> bytes:
    """Returns 16 bytes of the named values' digests; the names' order is the same on all ranks."""
    each = (digests.get(name, b"") for name in names)
    joined = b"".join(len(digest).to_bytes(1, "little") + digest for digest in each)
    return hashlib.blake2b(joined, digest_size=16).digest()


_PLACEMENTS = Placement.__module__
_LEAF, _MAPPING, _LIST, _TENSOR, _SHARDED = range(5)


def _kind_of(value: Any) -> int:
    """Returns how torch's `traverse_state_dict` takes a value."""
    if isinstance(value, Mapping):
        return _MAPPING
    if isinstance(value, list):
        return _LIST
    if isinstance(value, ShardedTensor):
        return _SHARDED
    return _TENSOR if isinstance(value, torch.Tensor) else _LEAF


def _describe_mesh(mesh: Any) -> bytes:
    fields = (mesh.device_type, mesh.mesh_dim_names, mesh.get_coordinate(), mesh.mesh.tolist())
    return repr(fields).encode(errors="surrogatepass")


def _describe_placement(placement: Placement) -> bytes | None:
    """Describes a placement that is neither Shard nor Replicate; None where it is not torch's."""
    # Its fields differ by version, and a pickle has them all.
    return pickle.dumps(placement) if type(placement).__module__ == _PLACEMENTS else None


def _describe_value(value: Any) -> bytes | None:
    """Returns b"" for any value that is planned as bytes, None for one that plans itself."""
    plans_itself = isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__")
    return None if plans_itself else b""


STATE_READER = _C.StateReader(
    {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "DTensor": DTensor,
        "Shard": Shard,
        "Replicate": Replicate,
        "kind_of": _kind_of,
        "describe_mesh": _describe_mesh,
        "describe_placement": _describe_placement,
        "describe_value": _describe_value,
        "hooks": tuple(HOOKS),
        "has_strides": HAS_STRIDES,
    }
)


def flattened(
    state: Any, *, is_flat: bool, has_flat_shards: bool
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Returns a state as `DefaultSavePlanner.set_up_planner` keeps it, the path of each name, and
    whether a key is no text, or a list has elements without a name.

    `is_flat` and `has_flat_shards` are the planner's `flatten_` options. Raises: as
    `naming_state_errors`.

    Source: torch.distributed.checkpoint._nested_dict.flatten_state_dict, and its caller.
    """
    paths: dict[str, Any] = {}
    has_sharded, is_odd = True, False
    if is_flat:
        # Not by torch, whose names another thread's load of an old checkpoint may change meanwhile.
        with naming_state_errors(state):
            state, paths, has_sharded, is_odd = STATE_READER.flatten(state)
    if has_flat_shards and has_sharded:
        state = _flatten_sharded_tensors(state)
    return state, paths, is_odd


def fingerprint_of(
    state: dict[str, Any], paths: dict[str, Any] | None, about: tuple[Any, ...]
) -> bytes | None:
    """Returns the 32 bytes of a fingerprint; None for a state that has none.

    Args:
        paths: of all names; None: the planner has none.
        about: what decides besides the state, by its repr.
    """
    if type(state) is not dict:
        return None
    try:
        described = STATE_READER.fingerprint(state, paths)
    except Exception:  # noqa: BLE001  (a tensor without sizes: planning says what is wrong with it)
        return None
    if described is None:
        return None
    header = repr((*about, torch.is_grad_enabled())).encode(errors="surrogatepass")
    everything = len(header).to_bytes(8, "little") + header + described
    return hashlib.blake2b(everything, digest_size=32).digest()
