"""Do all ranks make the same call? Compared before anything is written or read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_dcpx.errors import PlanError
from torch_dcpx.value_digests import conflicting_names

__all__ = ["Call", "check_same_call"]

logger = logging.getLogger("torch_dcpx")

_MAX_SHOWN = 5


@dataclass(frozen=True)
class Call:
    """What one rank tells the coordinator of its call; small, and pickled between ranks.

    Attributes:
        name: of the method.
        arguments: what must be equal on all ranks, by name: texts, numbers, kinds of parts.
        digests: of values of which a checkpoint keeps one; what differs is said, no error.
        note: what the coordinator needs besides.
    """

    name: str
    arguments: dict[str, Any]
    digests: dict[str, bytes] = field(default_factory=dict)
    note: Any = None


def check_same_call(calls: Sequence[Call]) -> Call:
    """Returns the coordinator's call, which is everybody's.

    Args:
        calls: by rank.

    Raises:
        PlanError: ranks differ; it names them, and how.
    """
    first = calls[0]
    differing: list[str] = []
    for rank, call in enumerate(calls[1:], 1):
        if call.name != first.name:
            differing.append(f"rank {rank} called {call.name}, rank 0 {first.name}")
            continue
        names = dict.fromkeys((*first.arguments, *call.arguments))
        wrong = [
            f"{name}={_shown(call, name)} where rank 0 has {_shown(first, name)}"
            for name in names
            if call.arguments.get(name) != first.arguments.get(name)
        ]
        if wrong:
            differing.append(f"rank {rank}: {'; '.join(wrong)}")
    if differing:
        shown = ". ".join(differing[:_MAX_SHOWN])
        more = f"; {len(differing)} ranks in all" if len(differing) > _MAX_SHOWN else ""
        raise PlanError(
            f"{first.name} of CheckpointManager: not the same call on every rank: {shown}{more}; "
            "nothing was done"
        )
    for name, ranks in conflicting_names(call.digests for call in calls).items():
        logger.warning(
            "%s: %s differs over the ranks (%s have values of their own); rank 0's is kept: put "
            "what is each rank's own into a PerRank",
            first.name,
            name,
            ", ".join(f"rank {rank}" for rank in ranks[:_MAX_SHOWN]),
        )
    return first


def _shown(call: Call, name: str) -> str:
    return f"{call.arguments[name]!r:.80}" if name in call.arguments else "nothing"
