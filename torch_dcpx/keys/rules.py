"""The rules of a KeyMap: each changes the entries that the rule before has left.

Two entries under one name are an error that names them, as is a rule that matches nothing.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch_dcpx._integers import plain_int
from torch_dcpx.errors import OptionError, PlanError
from torch_dcpx.keys.mapped_tensor import MappedTensor

Entries: TypeAlias = dict[str, MappedTensor]
_MAX_TRIED = 10_000  # numbers between two that are stored

_Group: TypeAlias = tuple[int, int, str]  # of a pattern: (0, number, "") or (1, 0, text)
_Matched: TypeAlias = tuple[tuple[_Group, ...], re.Match[str], MappedTensor]


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
    """Two dimensions of a tensor are swapped.

    Args:
        pattern: a regular expression of whole names.
        dims: the two dimensions. Default (0, 1).
    """

    pattern: str
    dims: tuple[int, int] = (0, 1)


_Rename: TypeAlias = Mapping[str, str | None] | tuple[str, str] | Callable[[str], str | None]
Rule: TypeAlias = _Rename | Split | Merge | Transpose


def checked_rule(rule: Rule) -> Rule:
    """Returns a rule that can work."""
    if isinstance(rule, Merge) and isinstance(rule.patterns, str):
        rule = rule._replace(patterns=(rule.patterns,))
    made_by = _made_by(rule)
    for pattern, _ in made_by:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise _refused(rule, f"{pattern!r} is no regular expression: {error}") from error
    for pattern, texts in made_by:
        for made in texts:
            if not isinstance(made, str) or not _can_make(pattern, made):
                raise _refused(
                    rule, f"{made!r} is no text that {pattern!r} could be replaced by: {rule!r}"
                )
    rule = _with_dims(rule)
    return _with_sizes(rule) if isinstance(rule, Split) and rule.sizes is not None else rule


def _refused(rule: object, message: str) -> OptionError:
    return OptionError(message, option="rules", value=rule)


def _with_dims(rule: Rule) -> Rule:
    """Returns the rule with its dimensions as ints. Raises OptionError: they are none."""
    given: Any = rule.dims if isinstance(rule, Transpose) else (getattr(rule, "dim", 0), 0)
    dims = tuple(map(plain_int, given)) if isinstance(given, tuple) else ()
    if [type(dim) for dim in dims] != [int, int]:
        raise _refused(rule, f"dimensions are ints, got {rule!r}")
    if isinstance(rule, Transpose):
        return rule._replace(dims=dims)
    return rule._replace(dim=dims[0]) if isinstance(rule, (Split, Merge)) else rule


def _with_sizes(rule: Split) -> Split:
    """Returns the rule with its sizes as ints. Raises OptionError: they are no counts."""
    sizes: Any = rule.sizes
    try:
        lengths = tuple(map(operator.index, sizes))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0 or any(isinstance(size, bool) for size in sizes):
        raise _refused(
            rule, f"sizes of a Split are a list of ints from 0 on, got {rule.sizes!r}: {rule!r}"
        )
    return rule._replace(sizes=lengths)


def _made_by(rule: Rule) -> list[tuple[str, Sequence[object]]]:
    """Returns the rule's patterns, each with the texts that it makes."""
    if isinstance(rule, Merge):
        return [(pattern, [rule.into]) for pattern in rule.patterns]
    if isinstance(rule, Split):
        # A text is a sequence of texts, and surely not meant.
        return [(rule.pattern, [None] if isinstance(rule.into, str) else rule.into)]
    if isinstance(rule, Transpose):
        return [(rule.pattern, [])]
    if isinstance(rule, tuple) and len(rule) == 2:
        return [(rule[0], rule[1:])]
    if not isinstance(rule, Mapping) and not callable(rule):
        raise _refused(
            rule,
            f"a rule of a KeyMap is a dict, a pair of texts, a callable, a Split, a Merge or a "
            f"Transpose, got {rule!r}",
        )
    return []


def _can_make(pattern: str, made: str) -> bool:
    """Returns whether a replacement names only groups that its pattern has."""
    try:
        re.sub(pattern, made, "")  # checks the replacement before it looks for a match
    except (re.error, IndexError, TypeError):
        return False
    return True


def applied(rule: Rule, entries: Entries, number: int, objects: frozenset[str]) -> Entries:
    """Returns what a checked rule makes of all entries.

    Args:
        entries: by the names that the rule before has given them.
        number: of the rule, for messages.
        objects: stored names that are no tensors.

    Raises: PlanError: as `KeyMap.resolve`.
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
    if isinstance(rule, (Split, Transpose)):
        found = re.fullmatch(rule.pattern, name)
        if found is None:
            return None
        if isinstance(rule, Split):
            _check_tensor(name, entry, objects, "split")
            return _split(rule, found, entry)
        _check_tensor(name, entry, objects, "transpose")
        return [(name, entry.transposed(*rule.dims))]
    renamed: object
    if isinstance(rule, Mapping):
        renamed = rule.get(name, name)
    elif isinstance(rule, tuple):
        pattern, replacement = cast("tuple[str, str]", rule)
        renamed, count = re.subn(pattern, replacement, name)
        if not count:
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
    rule: Split, found: re.Match[str], entry: MappedTensor
) -> list[tuple[str, MappedTensor]]:
    parts, begin = [], 0
    for into, length in zip(rule.into, _part_lengths(found.string, entry, rule), strict=True):
        if rule.squeeze:
            part = entry.selected(rule.dim, begin)
        else:
            part = entry.narrowed(rule.dim, begin, length)
        parts.append((found.expand(into), part))
        begin += length
    return parts


def _part_lengths(name: str, entry: MappedTensor, rule: Split) -> list[int]:
    """Returns the lengths of a split's parts. Raises PlanError: they do not fit."""
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
    merged: dict[str, list[list[_Matched]]] = {}  # by new name, a list for each pattern
    for name, entry in entries.items():
        for order, pattern in enumerate(rule.patterns):
            found = re.fullmatch(pattern, name)
            if found is not None:
                _check_tensor(name, entry, objects, "merge")
                matches = merged.setdefault(found.expand(rule.into), [[] for _ in rule.patterns])
                matches[order].append((tuple(map(_natural, found.groups())), found, entry))
                break
        else:
            _put(new, name, entry, number)
    if not merged:
        raise _unmatched(number, rule, tuple(rule.patterns))
    for into, matches in merged.items():
        absent = [pattern for pattern, own in zip(rule.patterns, matches, strict=True) if not own]
        if absent:
            raise PlanError(
                f"'{into}' is merged of {len(rule.patterns)} parts, and nothing is stored for "
                f"{', '.join(map(repr, absent))}",
                fqn=into,
            )
        parts = []
        for pattern, own in zip(rule.patterns, matches, strict=True):
            _check_numbers(into, pattern, own)
            parts += [entry for _, _, entry in sorted(own, key=lambda match: match[0])]
        if rule.stack:
            parts = [part.unsqueezed(rule.dim) for part in parts]
        _put(new, into, MappedTensor.joined(parts, rule.dim, into), number)
    return new


def _check_numbers(into: str, pattern: str, matches: Sequence[_Matched]) -> None:
    """Raises PlanError where the numbers of a group, behind equal groups, leave out a number that
    the pattern takes.
    """
    numbers: dict[tuple[_Group, ...], dict[int, tuple[re.Match[str], int]]] = {}
    for groups, found, _ in matches:
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
    """Returns the first of `numbers` that, put in the group's place, makes a name that matches."""
    begin, end = found.span(group)
    name = found.string
    for number in numbers[:_MAX_TRIED]:
        text = str(number).zfill(end - begin)
        if re.fullmatch(pattern, name[:begin] + text + name[end:]):
            return number
    return numbers[_MAX_TRIED] if len(numbers) > _MAX_TRIED else None


def _natural(group: str | None) -> _Group:
    """Returns a group's sort key: numbers as numbers, before texts."""
    text = group or ""
    return (0, int(text), "") if text.isdecimal() else (1, 0, text)
