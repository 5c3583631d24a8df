"""Parts of a state that give and take state dicts: `Stateful` objects, and `LoadPart`.

A load calls a `LoadPart` more often than DCP calls a `Stateful` object:

1. `state_dict` while the ranks plan: on every rank, in one order; it may run collectives.
2. `fitted` once the metadata is known: it chooses what to read, and runs no collective.
3. `check` after the read: it raises all that can be wrong, and changes nothing.
4. `load_state_dict` when `check` has passed on every rank. The load ends when all ranks are done.

An error in one of them is raised on all ranks, and none goes on to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """As `isinstance(value, Stateful)`, which takes 8 us for most values."""
    return hasattr(value, "load_state_dict") and isinstance(value, Stateful)


def with_state_dicts(state: Mapping[str, Any], growing: set[str] | None = None) -> dict[str, Any]:
    """Returns a state with the state dicts of its `Stateful` objects in their place; adds the keys
    of those that take all that was saved to `growing`.
    """
    made = dict(state.items())
    for key, value in made.items():
        if is_stateful(value):
            made[key] = value.state_dict()
            if growing is not None and takes_of(value) is Takes.ALL:
                growing.add(key)
    return made


class Takes(Enum):
    """A part takes these of the entries that only the checkpoint holds."""

    NOTHING = 0
    EXTRA_STATES = 1
    ALL = 2


EXTRA_STATE = "_extra_state"  # torch's key in the state of a module


def is_extra_state(key: object) -> bool:
    """Returns whether a key of a module's state is that of an extra state."""
    return type(key) is str and (key == EXTRA_STATE or key.endswith(f".{EXTRA_STATE}"))


def takes_of(value: Any) -> Takes:
    """Returns which entries a value of a state takes that only the checkpoint holds. Modules have
    exact names, and what lies in no `Stateful` object is the caller's.
    """
    if isinstance(value, LoadPart):
        return value.takes
    if not is_stateful(value):
        return Takes.NOTHING
    return Takes.EXTRA_STATES if isinstance(value, torch.nn.Module) else Takes.ALL


class LoadPart:
    """A part that a load calls four times. It belongs to one save or load; not thread-safe."""

    is_applied = True  # whether `load_state_dict` changes anything: then ranks wait for its end
    takes = Takes.NOTHING
    is_last = False  # whether `load_state_dict` comes after that of all parts that are not last

    def state_dict(self) -> dict[str, Any]:
        """Returns what the part holds."""
        raise NotImplementedError

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Returns the state to fill, made of that of `state_dict`; `key` names the part."""
        return state

    def check(self, state: dict[str, Any]) -> None:
        """Raises what is wrong with the state that was read."""

    def fills(self, name: str) -> bool:
        """Returns whether a value that is not stored is made of others. REQUIRES: `check`."""
        return False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state that was read. REQUIRES: in a load, `check` has passed."""
        raise NotImplementedError
