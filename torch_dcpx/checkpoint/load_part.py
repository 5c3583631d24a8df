"""A part of a state that a load asks more often than DCP asks a `Stateful` object.

1. `state_dict` while the ranks plan: on every rank, in one order; it may run collectives.
2. `fitted` behind it, when the metadata is known: what of the checkpoint is to be read.
3. `check` when everything was read: whatever can be wrong is raised here, and nothing changes yet.
4. `load_state_dict` when that holds on every rank. The load ends when it has on all of them.

An error in any of them is raised on all ranks, and the step behind it is made on none.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import Metadata


class LoadPart:
    """The base of such parts. One belongs to one save or load; not thread-safe.

    Attributes:
        is_applied: whether `load_state_dict` changes anything, for whose end ranks wait.
        is_last: whether it is called behind those of parts that are not.
    """

    is_applied = True
    is_last = False

    def state_dict(self) -> dict[str, Any]:
        """Returns what the part holds."""
        raise NotImplementedError

    def fitted(self, state: dict[str, Any], metadata: Metadata, key: str) -> dict[str, Any]:
        """Returns what is to be filled; runs no collective.

        Args:
            state: what `state_dict` returned.
            metadata: of the checkpoint.
            key: of this part in the state that is loaded.
        """
        return state

    def check(self, state: dict[str, Any]) -> None:
        """Raises what is wrong with what was read; changes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what was read. REQUIRES: `check`, where a load asks."""
        raise NotImplementedError
