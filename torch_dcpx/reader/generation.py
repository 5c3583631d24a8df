"""All ranks of a load must read the metadata of one save: each notes which one it read."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.planner import LoadPlan

from torch_dcpx.errors import StorageError


class Generation(NamedTuple):
    """A rank's note in its plan: the same on all ranks that load from one directory."""

    directory: str  # absolute; links are not followed, so that one that is switched is noticed
    save_id: str  # each save's own; "rank-local" for all that have no metadata in common


def check_same_generation(plans: Sequence[LoadPlan]) -> None:
    """Compares the ranks' notes. A planner that makes its own plans need not pass them on.

    Args:
        plans: of all ranks, in the order of the ranks.

    Raises:
        StorageError: ranks read the metadata of different saves; no tensor was touched.
    """
    first: dict[str, tuple[int, Generation]] = {}  # by directory: ranks may have their own
    for rank, plan in enumerate(plans):
        generation = plan.storage_data
        if type(generation) is not Generation:
            continue
        other, found = first.setdefault(generation.directory, (rank, generation))
        if found != generation:
            raise StorageError(
                f"the checkpoint in '{generation.directory}' was replaced while it was loaded: "
                f"rank {other} read that of save {found.save_id}, rank {rank} that of "
                f"{generation.save_id}; no tensor was touched, load it again",
                errno=errno.ESTALE,
                path=generation.directory,
                touched=(),
            )
