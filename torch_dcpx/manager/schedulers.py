"""The states of schedulers, and the check that each comes back to one like it.

A save notes the class of each scheduler by its place: "" of one, else its name or number, and
"PLACE/NUMBER" of one that another has. Earlier versions noted one level of these; older ones none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from torch_dcpx.errors import MismatchError, OptionError, with_article
from torch_dcpx.manager.translate import kind_of

SCHEDULER_CLASSES = "scheduler_classes"  # beneath a manager's own items

_PART = "lr_scheduler"
_WITHIN = "_schedulers"  # in the state of torch's schedulers of several
_OF_OLD_TORCH = {"verbose"}
_LEFT = "load_optimizer=False leaves optimizer and scheduler as they are"


def states_of(parts: Any) -> Any:
    """Returns `state_dict()` of one Stateful object, or of each in a list or dict."""
    if isinstance(parts, Mapping):
        return {name: part.state_dict() for name, part in parts.items()}
    if isinstance(parts, (list, tuple)):
        return [part.state_dict() for part in parts]
    return parts.state_dict()


def scheduler_classes(parts: Any) -> dict[str, dict[str, str]]:
    """Returns the name of each scheduler's class, as the key of a dict, by place."""
    return {place: {type(one).__name__: ""} for place, one in _placed(parts)}


def noted_classes(saved: Iterable[str]) -> dict[str, set[str]]:
    """Returns the saved classes by place, of several ranks each; `saved` are "PLACE.CLASS"."""
    noted: dict[str, set[str]] = {}
    for one in saved:
        place, _, kind = one.rpartition(".")
        noted.setdefault(place, set()).add(kind)
    return noted


def are_unlike(parts: Any, noted: Mapping[str, Collection[str]]) -> bool:
    """Returns whether schedulers are not those, by place and class, that a save has noted."""
    own = dict(_placed(parts))
    return bool(noted) and (
        own.keys() != noted.keys() or any(_other(one, noted[at]) for at, one in own.items())
    )


def check_sort(parts: Any, noted: Mapping[str, Collection[str]]) -> None:
    """Raises OptionError: one was saved, and a list or dict is given, or the like."""
    here, there = (
        {place.partition("/")[0] for place in places} for places in (dict(_placed(parts)), noted)
    )
    if noted and here != there:
        raise _another_sort(parts)


def paired_states(parts: Any, states: Any) -> list[tuple[Any, Any]]:
    """Returns each object with its state of `states_of`. Raises OptionError: not as many."""
    if isinstance(parts, Mapping):
        if type(states) is dict and states.keys() == parts.keys():
            return [(part, states[name]) for name, part in parts.items()]
    elif isinstance(parts, (list, tuple)):
        if type(states) is list and len(states) == len(parts):
            return list(zip(parts, states, strict=True))
    elif type(states) is not list or not isinstance(parts.state_dict(), Mapping):
        return [(parts, states)]
    raise _another_sort(parts)


def check_alike(
    parts: Any,
    pairs: Sequence[tuple[Any, Any]],
    noted: Mapping[str, Collection[str]],
    may_miss: Callable[[str], object],
    *,
    is_strict: bool,
) -> None:
    """Raises MismatchError: a scheduler, or one within it, was saved of another kind.

    Args:
        pairs: as `paired_states` returns them for `parts`.
        noted: the classes that were saved. Where a place has none, names tell: each state has
            such as the other has not. Versions of torch give one class more, or fewer.
        is_strict: whether to refuse more than what no scheduler of torch could take.
    """
    may = may_miss if is_strict and not may_miss(_PART) else None
    for (place, _), (one, state) in zip(_named(parts), pairs, strict=True):
        _check(one, type(one).__name__, one.state_dict(), state, place, noted, may)


def _check(
    one: Any,
    kind: str,
    own: Any,
    saved: Any,
    place: str,
    noted: Mapping[str, Collection[str]],
    may_miss: Callable[[str], object] | None,
) -> None:
    """Checks the state of one scheduler, and of those within it.

    Args:
        one: None of one that its owner does not show.
        kind: its class, or its owner's.
        may_miss: None: anything may be otherwise that it can take.
    """
    are_named = isinstance(own, Mapping) and isinstance(saved, Mapping)
    here, there = (each.get(_WITHIN) if are_named else None for each in (own, saved))
    if isinstance(here, list) and isinstance(there, list):
        if len(there) > len(here) or (may_miss is not None and len(here) != len(there)):
            raise MismatchError(
                f"lr_scheduler is, or has, {with_article(kind)} of {len(here)} schedulers, and one "
                f"of {len(there)} was saved; give as many, or {_LEFT}",
                fqn=_PART,
            )
        within = _within(one)
        for at, (its, state) in enumerate(zip(here, there, strict=False)):
            inner = within[at] if at < len(within) else None
            name = kind if inner is None else type(inner).__name__
            _check(inner, name, its, state, f"{place}/{at}", noted, may_miss)
    if may_miss is not None:
        other = "" if one is None else _other(one, noted.get(place, ()))
        mine, theirs = (own, saved) if are_named else ({}, {})
        _check_names(kind, mine, theirs, may_miss, other)
    if isinstance(here, list) and not isinstance(there, list) and isinstance(one, LRScheduler):
        raise MismatchError(
            f"lr_scheduler is, or has, {with_article(kind)} of {len(here)} schedulers, and one of "
            f"none was saved; give one of the kind that was saved, or {_LEFT}",
            fqn=_PART,
        )


def _check_names(
    kind: str,
    own: Mapping[Any, Any],
    saved: Mapping[Any, Any],
    may_miss: Callable[[str], object],
    other: str,
) -> None:
    here, there = (
        {key for key in each if key == _WITHIN or not str(key).startswith("_")}
        for each in (own, saved)
    )
    missing, left = (
        sorted(name for key in keys if not may_miss(name := f"{_PART}.{key}"))
        for keys in (here - there, there - here - _OF_OLD_TORCH)
    )
    known = here | there
    if other and known and all(may_miss(f"{_PART}.{key}") for key in known):
        return
    if other or (missing and left):
        differs = [f"it had {', '.join(left[:5])}"] if left else []
        differs += [f"it had no {', '.join(missing[:5])}"] if missing else []
        was = f"another kind, {other}," if other else "another kind"
        raise MismatchError(
            f"lr_scheduler is, or has, {with_article(kind)}, and {was} was saved"
            f"{': ' if differs else ''}{', and '.join(differs)}; give one of the kind that was "
            f"saved; strict=False, or allow_missing=['{_PART}*'], takes what there is, {_LEFT}",
            fqn=(*left, *missing, _PART)[0],
            missing=tuple(missing),
            left=tuple(left),
        )


def _other(one: Any, saved: Collection[str]) -> str:
    """Returns the saved classes where a scheduler is of none of them, else ""."""
    is_one = any(base.__name__ in saved for base in type(one).__mro__)
    return "" if is_one else " or ".join(sorted(saved))


def _named(parts: Any) -> list[tuple[str, Any]]:
    """Returns each scheduler that is given, with its place."""
    if isinstance(parts, (list, tuple)):
        return [(str(at), one) for at, one in enumerate(parts)]
    named = parts if isinstance(parts, Mapping) else {"": parts}
    return [(str(name), one) for name, one in named.items()]


def _placed(parts: Any) -> Iterator[tuple[str, Any]]:
    """Yields each scheduler with its place, and those that it has."""
    waiting = _named(parts)[::-1]
    while waiting:
        place, one = waiting.pop()
        yield place, one
        waiting += [(f"{place}/{at}", inner) for at, inner in enumerate(_within(one))][::-1]


def _within(one: Any) -> Sequence[Any]:
    own = getattr(one, _WITHIN, ())
    return own if isinstance(own, (list, tuple)) else ()


def _another_sort(parts: Any) -> OptionError:
    return OptionError(
        f"lr_scheduler is {kind_of(parts)}, and another sort was saved: give as many, under the "
        f"same names; {_LEFT}",
        option=_PART,
    )
