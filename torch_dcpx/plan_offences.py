"""What is wrong with the chunks of a save, in stock's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["offence_text"]


def offence_text(
    entries: Mapping[str, Any],
    fqn: str,
    offence: str,
    chunk: int,
    other: int,
    point: tuple[int, ...],
) -> str:
    """Returns one tensor's error."""
    entry = entries[fqn]
    if offence == "outside":
        return (
            f"key:{fqn} has out of bounds chunk: tensor-size:{entry.size} chunk: "
            f"{entry.chunks[chunk]}"
        )
    if offence == "overlap":
        return f"key:{fqn} has overlapping chunks: {entry.chunks[other]} {entry.chunks[chunk]}"
    if offence == "hole":
        return (
            f"key:{fqn} invalid fill tensor-volume: no chunk holds element {list(point)} of "
            f"tensor-size:{entry.size}"
        )
    if offence == "too large":
        return f"key:{fqn} has 2**63 elements or more: tensor-size:{entry.size}"
    return f"key:{fqn} has chunks of other dimensions than tensor-size:{entry.size}"
