"""The rules of a KeyMap: each makes other entries of those that the rule before has left.

Two entries under one name, and a rule that nothing matches, are errors with names.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch_dcpx.errors import OptionError, PlanError
from torch_dcpx.keys.mapped_tensor import MappedTensor

Entries: TypeAlias = dict[str, MappedTensor]
_MAX_TRIED = 10_000  # numbers between two that are stored

_Group: TypeAlias = tuple[int, int, str]  # of a pattern: (0, number, "") or (1, 0, text)


class Split(NamedTuple):
    """One stored tensor becomes several, along a dimension.

    Args:
        pattern: regular expression that a whole name matches.
        into: names of the parts, in order; `\\1` stands for the pattern's first group.
        dim: the dimension. Default 0.
        sizes: of the parts along it, in elements. Default None: equal ones.
        squeeze: the dimension goes, as in `unbind`; each part is one slice. Default False.
    """

    pattern: str
    into: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None
    squeeze: bool = False


class Merge(NamedTuple):
    """Several stored tensors become one, one after the other along a dimension.

    Args:
        patterns: regular expressions that whole names match, in the order of the parts. Names that
            match the same one are ordered by its groups, numbers as numbers, which leave out none
            that it would match.
        into: the new name; `\\1` stands for the first group. Names that give the same are merged.
        dim: the dimension. Default 0.
        stack: along a new dimension, as `torch.stack` does. Default False: `torch.cat`.
    """

    patterns: Sequence[str]
    into: str
    dim: int = 0
    stack: bool = False


class Transpose(NamedTuple):
    """Two dimensions of a tensor are swapped. `pattern` is a regular expression of whole names."""

    pattern: str
    dims: tuple[int, int] = (0, 1)


Rule: TypeAlias = (
    Mapping[str, str | None]
    | tuple[str, str]
    | Callable[[str], str | None]
    | Split
    | Merge
    | Transpose
)


def checked_rule(rule: Rule) -> Rule:
    """Returns a rule that can work."""
    if isinstance(rule, Merge) and isinstance(rule.patterns, str):
        rule = rule._replace(patterns=(rule.patterns,))
    patterns: Sequence[str] = ()
    if isinstance(rule, Merge):
        patterns = rule.patterns
    elif isinstance(rule, (Split, Transpose)):
        patterns = (rule.pattern,)
    elif isinstance(rule, tuple) and len(rule) == 2:
        patterns = rule[:1]
    elif not isinstance(rule, Mapping) and not callable(rule):
        raise OptionError(
            f"a rule of a KeyMap is a dict, a pair of texts, a callable, a Split, a Merge or a "
            f"Transpose, got {rule!r}",
            option="rules",
            value=rule,
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise OptionError(
                f"{pattern!r} is no regular expression: {error}", option="rules", value=rule
            ) from error
    for pattern, made in _made_by(rule):
        if not isinstance(made, str) or not _can_make(pattern, made):
            raise OptionError(
                f"{made!r} is no text that {pattern!r} could be replaced by: {rule!r}",
                option="rules",
                value=rule,
            )
    numbers = rule.dims if isinstance(rule, Transpose) else (getattr(rule, "dim", 0),)
    is_pair = not isinstance(rule, Transpose) or (isinstance(numbers, tuple) and len(numbers) == 2)
    if not is_pair or not all(type(number) is int for number in numbers):
        raise OptionError(f"dimensions are ints, got {rule!r}", option="rules", value=rule)
    return _with_sizes(rule) if isinstance(rule, Split) and rule.sizes is not None else rule


def _with_sizes(rule: Split) -> Split:
    """Returns the rule with its sizes as ints. Raises OptionError: they are no counts."""
    sizes: Any = rule.sizes
    try:
        lengths = tuple(map(operator.index, sizes))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0 or any(isinstance(size, bool) for size in sizes):
        raise OptionError(
            f"sizes of a Split are a list of ints from 0 on, got {rule.sizes!r}: {rule!r}",
            option="rules",
            value=rule,
        )
    return rule._replace(sizes=lengths)


def _made_by(rule: Rule) -> list[tuple[str, object]]:
    """Returns the rule's patterns, each with a text that it makes."""
    if isinstance(rule, Merge):
        return [(pattern, rule.into) for pattern in rule.patterns]
    if isinstance(rule, Split):
        # A text is a sequence of texts, and surely not meant.
        into = [None] if isinstance(rule.into, str) else rule.into
        return [(rule.pattern, one) for one in into]
    if isinstance(rule, tuple) and not isinstance(rule, Transpose):
        return [(rule[0], rule[1])]
    return []


def _can_make(pattern: str, made: str) -> bool:
    """Returns whether a replacement names only groups that its pattern has."""
    try:
        re.sub(pattern, made, "")  # checks the replacement before it looks for a match
    except (re.error, IndexError, TypeError):
        return False
    return True


def applied(rule: Rule, entries: Entries, number: int, objects: frozenset[str]) -> Entries:
    """Returns what a rule makes of all entries.

    Args:
        rule: that was checked.
        entries: by the names that the rule before has given them.
        number: of the rule, for messages.
        objects: stored names of what is no tensor.

    Raises:
        PlanError: two entries get one name, the rule matches nothing, or shapes do not allow it.
    """
    if isinstance(rule, Merge):
        return _merge(entries, rule, number, objects)
    if isinstance(rule, Mapping):
        missing = [name for name in rule if name not in entries]
        if missing:
            raise _unmatched(number, rule, missing[0] if len(missing) == 1 else missing)
    new: Entries = {}
    is_matched = False
    for name, entry in entries.items():
        made = _made(rule, name, entry, objects)
        is_matched |= made is not None
        for new_name, part in [(name, entry)] if made is None else made:
            _put(new, new_name, part, number)
    if isinstance(rule, tuple) and not is_matched:
        raise _unmatched(number, rule, rule[0])
    return new


def _made(
    rule: Rule, name: str, entry: MappedTensor, objects: frozenset[str]
) -> list[tuple[str, MappedTensor]] | None:
    """Returns the entries that a rule makes of one; None where its pattern does not match."""
    if isinstance(rule, Split):
        return _split(rule, name, entry, objects)
    if isinstance(rule, Transpose):
        if re.fullmatch(rule.pattern, name) is None:
            return None
        _check_tensor(name, entry, objects, "transpose")
        return [(name, entry.transposed(*rule.dims))]
    renamed: object
    if isinstance(rule, Mapping):
        renamed = rule.get(name, name)
    elif isinstance(rule, tuple):
        pattern, replacement = cast("tuple[str, str]", rule)
        renamed, found = re.subn(pattern, replacement, name)
        if not found:
            return None
    else:
        renamed = rule(name)
    if renamed is None:
        return []
    if not isinstance(renamed, str):
        raise PlanError(f"a rule of the KeyMap makes {renamed!r} of '{name}'", fqn=name)
    return [(renamed, entry)]


def _put(entries: Entries, name: str, entry: MappedTensor, number: int) -> None:
    other = entries.get(name)
    if other is not None:
        both = " and ".join(f"'{' + '.join(one.sources)}'" for one in (other, entry))
        raise PlanError(f"{both} both become '{name}' by rule {number} of the KeyMap", fqn=name)
    entries[name] = entry


def _unmatched(number: int, rule: Rule, what: object) -> PlanError:
    return PlanError(
        f"rule {number} of the KeyMap, {type(rule).__name__}, matches no stored name: {what!r}",
        fqn=what if isinstance(what, str) else None,
    )


def _check_tensor(name: str, entry: MappedTensor, objects: frozenset[str], what: str) -> None:
    if not objects.isdisjoint(entry.sources):
        raise PlanError(f"'{name}' is an object, which nobody can {what}", fqn=name)


def _split(
    rule: Split, name: str, entry: MappedTensor, objects: frozenset[str]
) -> list[tuple[str, MappedTensor]] | None:
    found = re.fullmatch(rule.pattern, name)
    if found is None:
        return None
    _check_tensor(name, entry, objects, "split")
    parts, begin = [], 0
    for into, length in zip(rule.into, _part_lengths(name, entry, rule), strict=True):
        part = (
            entry.selected(rule.dim, begin)
            if rule.squeeze
            else entry.narrowed(rule.dim, begin, length)
        )
        parts.append((found.expand(into), part))
        begin += length
    return parts


def _part_lengths(name: str, entry: MappedTensor, rule: Split) -> list[int]:
    """Returns the lengths of a split's parts. Raises: PlanError where they do not fit."""
    count = len(rule.into)
    if entry.sizes is None:
        return [1] * count
    size = entry.sizes[entry._dim(rule.dim)]
    lengths = [size // max(1, count)] * count if rule.sizes is None else list(rule.sizes)
    is_fitting = len(lengths) == count and sum(lengths) == size and min(lengths, default=0) >= 0
    if not is_fitting or (rule.squeeze and set(lengths) - {1}):
        raise PlanError(
            f"'{name}' of sizes {list(entry.sizes)} cannot be split along dimension {rule.dim} "
            f"into {count} parts of {lengths}",
            fqn=name,
        )
    return lengths


def _merge(entries: Entries, rule: Merge, number: int, objects: frozenset[str]) -> Entries:
    new: Entries = {}
    merged: dict[str, list[tuple[int, tuple[_Group, ...], MappedTensor]]] = {}
    matches: dict[tuple[str, int], list[re.Match[str]]] = {}  # by new name and pattern
    for name, entry in entries.items():
        for order, pattern in enumerate(rule.patterns):
            found = re.fullmatch(pattern, name)
            if found is not None:
                _check_tensor(name, entry, objects, "merge")
                into = found.expand(rule.into)
                groups = tuple(map(_natural, found.groups()))
                merged.setdefault(into, []).append((order, groups, entry))
                matches.setdefault((into, order), []).append(found)
                break
        else:
            _put(new, name, entry, number)
    if not merged:
        raise _unmatched(number, rule, tuple(rule.patterns))
    for into, group in merged.items():
        absent = set(range(len(rule.patterns))) - {order for order, _, _ in group}
        if absent:
            raise PlanError(
                f"'{into}' is merged of {len(rule.patterns)} parts, and nothing is stored for "
                f"{', '.join(repr(rule.patterns[order]) for order in sorted(absent))}",
                fqn=into,
            )
        for order, pattern in enumerate(rule.patterns):
            _check_numbers(into, pattern, matches[into, order])
        parts = [part for _, _, part in sorted(group, key=lambda row: row[:2])]
        if rule.stack:
            parts = [part.unsqueezed(rule.dim) for part in parts]
        _put(new, into, MappedTensor.joined(parts, rule.dim, into), number)
    return new


def _check_numbers(into: str, pattern: str, matches: Sequence[re.Match[str]]) -> None:
    """Raises PlanError where numbers of a pattern's group, behind the same groups, leave one out
    that the pattern would take.

    Args:
        into: the new name.
        matches: of the names that match the pattern and are merged into it.
    """
    numbers: dict[tuple[_Group, ...], dict[int, tuple[re.Match[str], int]]] = {}
    for found in matches:
        groups = tuple(map(_natural, found.groups()))
        for at, (is_text, number, _) in enumerate(groups):
            if not is_text:
                numbers.setdefault(groups[:at], {})[number] = found, at + 1
    for places in numbers.values():
        for low, high in itertools.pairwise(sorted(places)):
            absent = _left_out(pattern, *places[low], range(low + 1, high))
            if absent is not None:
                raise PlanError(
                    f"'{into}' is merged of what {pattern!r} matches, and of the numbers from "
                    f"{min(places)} to {max(places)} nothing is stored for {absent}; a pattern for "
                    "each part merges what there is",
                    fqn=into,
                )


def _left_out(pattern: str, found: re.Match[str], group: int, numbers: range) -> int | None:
    """Returns the first of these numbers with which, in the group's place, the name matches too."""
    begin, end = found.span(group)
    name = found.string
    for number in numbers[:_MAX_TRIED]:
        text = str(number).zfill(end - begin)
        if re.fullmatch(pattern, name[:begin] + text + name[end:]):
            return number
    return numbers[_MAX_TRIED] if len(numbers) > _MAX_TRIED else None


def _natural(group: str | None) -> _Group:
    """Returns what orders a pattern's groups: numbers as numbers, before texts."""
    text = group or ""
    return (0, int(text), "") if text.isdecimal() else (1, 0, text)
