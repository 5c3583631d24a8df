"""What each rank has of its own: the state of its data loader, of its random generators.

Saved under a name a rank, it comes back to the rank that it is of. On another number of ranks
nobody can know whose is whose: then a function of the user's merges what all ranks had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch_dcpx.errors import MismatchError, OptionError

# What this rank gets: from the objects of all ranks that saved, by rank; rank; ranks now.
MergeFunction: TypeAlias = Callable[[list[Any], int, int], Any]
Merge: TypeAlias = MergeFunction | Mapping[str, MergeFunction] | None


class PerRank:
    """A value of this rank alone; anywhere in `user_content`, or a value of `state`.

    Attributes:
        value: of the types of `user_content`. `resume(state={"name": PerRank(None)})` sets it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


def checked_merge(merge: Any) -> list[str] | bool:
    """Returns what ranks compare of `resume(merge=)`. Raises OptionError: it cannot be called."""
    if merge is None or callable(merge):
        return merge is not None
    if not isinstance(merge, Mapping) or not all(
        type(name) is str and callable(function) for name, function in merge.items()
    ):
        raise OptionError(
            f"merge must be a function, or a dict of functions by name, got {merge!r:.80}",
            option="merge",
            value=None,
        )
    return sorted(merge)


def merged(
    stored: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    merge: Merge,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """Returns what this rank gets of each name.

    Args:
        stored: what each rank that saved had, by name.
        names: that are asked for.
        merge: one function for all names, or one each.
        rank: this one.
        world_size: ranks now; another number than those that saved.
    """
    return {
        name: _function(merge, name)([own[name] for own in stored], rank, world_size)
        for name in names
    }


def check_mergeable(
    names: Sequence[str], merge: Merge, saved_ranks: int, world_size: int, path: str
) -> None:
    """Raises MismatchError where ranks have changed in number and nobody says how to merge."""
    if saved_ranks == world_size:
        return
    missing = [name for name in names if _function(merge, name) is None]
    if missing:
        raise MismatchError(
            f"resume from '{path}': {', '.join(map(repr, missing[:5]))} is each rank's own, of "
            f"{saved_ranks} ranks, and there are {world_size} now; give resume(merge=function) or "
            "merge={name: function}, called as function(values_by_rank, rank, world_size), or do "
            "not ask for it",
            fqn=missing[0],
            path=path,
            missing=tuple(missing),
        )


def _function(merge: Merge, name: str) -> Any:
    return merge.get(name) if isinstance(merge, Mapping) else merge
