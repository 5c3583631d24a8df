"""KeyMap: stored names and shapes to those of a model, while a load is planned; and its dry run.

1. Components of wrappers leave the stored names, as `wrappers` says.
2. The rules are applied in their order.

A load knows the names that are wanted. So it tries more than one reading of `module.`: as a
submodule's, and as a wrapper's (`readings`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch_dcpx._arguments import check_bool
from torch_dcpx.errors import PlanError, must_be
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.keys.rules import Entries, Rule, applied, checked_rule
from torch_dcpx.keys.wrappers import MODULE, PRIVATE, WRAPPERS, has_words, renamed, unwrapped
from torch_dcpx.reader.pretrained_reader import stored_sizes
from torch_dcpx.storage.paths import checked_location


class DryRun(NamedTuple):
    """Stored names and the names that a map gives them. `print()` shows a table."""

    rows: tuple[tuple[tuple[str, ...], str], ...]  # stored names, new name
    dropped: tuple[str, ...]  # stored names of which nothing is left

    def __str__(self) -> str:
        lines = [f"{' + '.join(old)} -> {new}" for old, new in self.rows]
        return "\n".join([*lines, *(f"{name} -> (left out)" for name in self.dropped)])


class KeyMap:
    """Renames, splits, merges and transposes what is stored. Immutable; picklable if its rules are.

    Args:
        rules: each of them one of
            a dict, stored name to new name, or None to leave it out; each name must be there;
            a pair (regular expression, replacement), for `re.sub`;
            a callable, name to new name, or None to leave it out;
            `Split`, `Merge`, `Transpose`.
        wrappers: which components of wrappers are left out of names, at any level, before the
            rules see them. None (default): those that torch alone puts there (`_orig_mod.`,
            `_checkpoint_wrapped_module.`, `_fsdp_wrapped_module.`); of a module at hand those of
            its wrappers, DDP's `module.` too. A load also finds each name that differs in them
            from one stored name only. True: every `module.`, too. False: none. Names that would
            become one keep theirs.

    Raises:
        OptionError: a rule is none of these, or no regular expression.
    """

    def __init__(self, *rules: Rule, wrappers: bool | None = None) -> None:
        if wrappers is not None:
            check_bool("wrappers", wrappers)
        self.rules = tuple(map(checked_rule, rules))
        self.wrappers = wrappers

    def resolve(
        self,
        stored: Mapping[str, Sizes | None],
        *,
        tensors_only: bool = False,
        part: str = "",
        plain: Mapping[str, str] | None = None,
    ) -> Entries:
        """Returns what the stored entries become, by their new names.

        Args:
            stored: sizes of tensors by stored name, None for objects.
            tensors_only: whether None stands for a tensor of unknown sizes instead.
            part: what begins the names that are meant; rules see those without it. Default: all.
            plain: names without wrappers, of those that a module at hand has. Default None.

        Raises:
            PlanError: two entries get one name, a rule matches nothing, or shapes do not allow it.
        """
        names = self._names(stored, part, plain or {})[0]
        try:
            return self._applied(stored, names, _objects_in({} if tensors_only else stored))
        except PlanError as error:
            if self.wrappers is None and has_words(names):
                by_word = KeyMap(*self.rules, wrappers=True)
                with suppress(PlanError):
                    by_word.resolve(stored, tensors_only=tensors_only, part=part)
                    error = _with_way_out(error)
            raise error from None

    def _names(
        self, stored: Mapping[str, Any], part: str, plain: Mapping[str, str]
    ) -> list[dict[str, str]]:
        """Returns the names that rules may see, by stored name: those of `resolve` first."""
        own = [name for name in stored if name.startswith(part)]
        bare = {name: name.removeprefix(part) for name in own}
        if self.wrappers is False or not has_words(own):
            return [bare]
        by_word = renamed(bare.values(), unwrapped)
        if self.wrappers:
            return [{name: by_word[one] for name, one in bare.items()}]
        known = {name.removeprefix(part): new.removeprefix(part) for name, new in plain.items()}
        found = [renamed(bare.values(), lambda one: known.get(one) or unwrapped(one, PRIVATE))]
        inner = {name: name for name in bare.values()}
        found.append(inner)
        while word := _first_word(inner.values()):  # in all names: the state of a wrapper
            inner = {name: one.removeprefix(f"{word}.") for name, one in inner.items()}
            short = renamed(inner.values(), lambda one: unwrapped(one, PRIVATE))
            found += [{name: short[one] for name, one in inner.items()}, inner]
        if self.rules:  # else it finds no more than a load does by itself
            found.append(by_word)
        ways = [names for at, names in enumerate(found) if names not in found[:at]]
        return [{name: names[one] for name, one in bare.items()} for names in ways]

    def _applied(
        self,
        stored: Mapping[str, Sizes | None],
        names: Mapping[str, str],
        objects: frozenset[str],
    ) -> Entries:
        """Returns what the rules make of the entries with these names. Raises: PlanError."""
        entries = {new: MappedTensor.whole(name, stored[name]) for name, new in names.items()}
        for number, rule in enumerate(self.rules):
            entries = applied(rule, entries, number, objects)
        return entries

    def dry_run(
        self, source: str | os.PathLike[str] | Mapping[str, Sizes | None] | Iterable[str]
    ) -> DryRun:
        """Returns old and new names; `print()` shows them. Nothing is read but names and shapes.

        Args:
            source: path of a checkpoint or of safetensors files; or stored names, with their sizes
                or without, in which case shapes are not checked.

        Raises:
            PlanError: as a load with this map would.
            OptionError: `source` is neither a path nor names.
            NotCommittedError, CorruptionError, StorageError: the path cannot be read.
        """
        if isinstance(source, (str, os.PathLike)):
            checked_location(source, "mount it, and name the directory", "source")
            source = stored_sizes(source)
        given: Any = source
        if not isinstance(given, Iterable) or isinstance(given, bytes):
            raise must_be("source", source, "a path, or names of what is stored")
        stored = source if isinstance(source, Mapping) else dict.fromkeys(source)
        entries = self.resolve(stored, tensors_only=stored is not source)
        rows = tuple((entry.sources, name) for name, entry in entries.items())
        used = {name for sources, _ in rows for name in sources}
        return DryRun(rows, tuple(name for name in stored if name not in used))


def readings(
    key_map: KeyMap, stored: Mapping[str, Sizes | None], *, part: str = ""
) -> Iterator[Entries]:
    """Yields what the stored entries may become, for a load to choose: the first, as `resolve`
    does, then with `module.` taken for a wrapper's. Rules may run for each.

    Raises: PlanError: as `resolve`, if the rules fit none of them.
    """
    if type(key_map).resolve is not KeyMap.resolve:
        yield key_map.resolve(stored, part=part)
        return
    objects, error = _objects_in(stored), None
    is_any = False
    for names in key_map._names(stored, part, {}):
        try:
            entries = key_map._applied(stored, names, objects)
        except PlanError as failure:
            error = error or failure
        else:
            is_any = True
            yield entries
    if error is not None and not is_any:
        raise error


def keeps_names(key_map: KeyMap, names: Iterable[str]) -> bool:
    """Returns whether all names surely stay as they are; searches one text of all names."""
    if key_map.rules or key_map.wrappers is False:
        return not key_map.rules
    return not has_words(names)


def checked_map(key_map: KeyMap | None) -> KeyMap | None:
    """Returns the argument of an entry point. Raises: OptionError."""
    given: Any = key_map
    if given is not None and not isinstance(given, KeyMap):
        is_rules = isinstance(given, (Mapping, tuple)) or callable(given)
        raise must_be("key_map", given, "a KeyMap or None", "; write KeyMap(...)" * is_rules)
    return key_map


def _first_word(names: Iterable[str]) -> str:
    """Returns the wrapper's word that all names have as their first component; "" if none."""
    firsts = {name.partition(".")[:2] for name in names}
    word, dot = firsts.pop() if len(firsts) == 1 else ("", "")
    return word if dot and word in WRAPPERS else ""


def _objects_in(stored: Mapping[str, Sizes | None]) -> frozenset[str]:
    return frozenset(name for name, sizes in stored.items() if sizes is None)


def _with_way_out(error: PlanError) -> PlanError:
    way = f"; wrappers=True in the KeyMap leaves '{MODULE}.' out before the rules"
    return PlanError(error.message + way, fqn=error.fqn)
