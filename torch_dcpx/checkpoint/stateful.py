"""Parts of a state that give and take state dicts: `Stateful` objects, and `LoadPart`.

A load calls a `LoadPart` more often than DCP calls a `Stateful` object:

1. `state_dict` while the ranks plan: on every rank, in one order; it may run collectives.
2. `fitted` next, when the metadata is known: it chooses what to read of the checkpoint.
3. `check` when everything was read: it raises whatever can be wrong, and changes nothing yet.
4. `load_state_dict` when `check` has passed on every rank. The load ends when all ranks are done.

All ranks raise an error in any of them, and none makes the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Returns what `isinstance(value, Stateful)` does, which takes 8 us for most values."""
    return hasattr(value, "load_state_dict") and isinstance(value, Stateful)


def with_state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with the state dicts of its `Stateful` objects in their place."""
    return {
        key: value.state_dict() if is_stateful(value) else value for key, value in state.items()
    }


class LoadPart:
    """A part that a load calls four times. It belongs to one save or load; not thread-safe.

    Attributes:
        is_applied: whether `load_state_dict` changes anything: then ranks wait for its end.
        is_last: whether its `load_state_dict` comes after those of all parts that are not last.
    """

    is_applied = True
    is_last = False

    def state_dict(self) -> dict[str, Any]:
        """Returns what the part holds."""
        raise NotImplementedError

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Returns what the load fills; runs no collective.

        Args:
            state: what `state_dict` returned.
            metadata: of the checkpoint.
            key: of this part in the state that is loaded.
        """
        return state

    def check(self, state: dict[str, Any]) -> None:
        """Raises what is wrong with what was read; changes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what was read. REQUIRES: in a load, `check` has passed."""
        raise NotImplementedError
