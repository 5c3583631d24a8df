"""KeyMap: stored names and shapes to those of a model, while a load is planned; and its dry run.

1. Wrapper components leave the stored names (`wrappers=True`).
2. The rules are applied in their order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch_dcpx._arguments import check_bool
from torch_dcpx.errors import must_be
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.keys.rules import Entries, Rule, applied, checked_rule
from torch_dcpx.reader.pretrained_reader import stored_sizes
from torch_dcpx.storage.paths import checked_location

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})


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
        wrappers: whether `_orig_mod.`, `_checkpoint_wrapped_module.`, `_fsdp_wrapped_module.` and
            `module.`, at any level, are left out of names when stored and wanted ones are compared.
            Rules then see stored names without them. Default True.

    Raises:
        OptionError: a rule is none of these, or no regular expression.
    """

    def __init__(self, *rules: Rule, wrappers: bool = True) -> None:
        check_bool("wrappers", wrappers)
        self.rules = tuple(map(checked_rule, rules))
        self.wrappers = wrappers

    def resolve(
        self, stored: Mapping[str, Sizes | None], *, tensors_only: bool = False, part: str = ""
    ) -> Entries:
        """Returns what the stored entries become, by their new names.

        Args:
            stored: sizes of tensors by stored name, None for objects.
            tensors_only: whether None stands for a tensor of unknown sizes instead.
            part: what begins the names that are meant; rules see those without it. Default: all.

        Raises:
            PlanError: two entries get one name, a rule matches nothing, or shapes do not allow it.
        """
        entries = {
            name.removeprefix(part): MappedTensor.whole(name, sizes)
            for name, sizes in stored.items()
            if name.startswith(part)
        }
        if self.wrappers:
            entries = _without_wrappers(entries)
        known = () if tensors_only else stored.items()
        objects = frozenset(name for name, sizes in known if sizes is None)
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


def keeps_names(key_map: KeyMap, names: Iterable[str]) -> bool:
    """Returns whether all names surely stay as they are; searches one text of all names."""
    if key_map.rules or not key_map.wrappers:
        return not key_map.rules
    text = "\n".join(map(str, names))
    return not any(wrapper in text for wrapper in WRAPPERS)


def checked_map(key_map: KeyMap | None) -> KeyMap | None:
    """Returns the argument of an entry point. Raises: OptionError."""
    given: Any = key_map
    if given is not None and not isinstance(given, KeyMap):
        is_rules = isinstance(given, (Mapping, tuple)) or callable(given)
        raise must_be("key_map", given, "a KeyMap or None", "; write KeyMap(...)" * is_rules)
    return key_map


def unwrapped(name: str) -> str:
    """Returns a name without the components that wrappers put into it."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _without_wrappers(entries: Entries) -> Entries:
    """Returns entries by names without wrappers; those that would then meet keep theirs."""
    bare = {name: unwrapped(name) for name in entries}
    counts = Counter(bare.values())
    return {
        (bare[name] if bare[name] and counts[bare[name]] == 1 else name): entry
        for name, entry in entries.items()
    }
