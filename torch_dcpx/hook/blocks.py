"""Blocks of `use` that may overlap, in threads or tasks: what each goes back to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

_State = TypeVar("_State")


@dataclass(eq=False)
class Block(Generic[_State]):
    """A block that has begun.

    Attributes:
        before: what counted when it began; of an earlier block that has ended, what counted before.
    """

    before: _State


class Blocks(Generic[_State]):
    """The blocks that have begun and not ended; the last begun one counts. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[Block[_State]] = []

    def begin(self, before: _State) -> Block[_State]:
        """Begins a block."""
        self._blocks.append(Block(before))
        return self._blocks[-1]

    def end(self, block: Block[_State]) -> bool:
        """Ends a block. Returns whether `before` counts now; else a later one goes back to it."""
        at = self._blocks.index(block)
        del self._blocks[at]
        if at == len(self._blocks):
            return True
        self._blocks[at].before = block.before
        return False
