"""KeyMap: what a user says of names and shapes, and its dry run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch_dcpx.keys.mapped_tensor import Sizes
from torch_dcpx.keys.rules import KeyRules
from torch_dcpx.reader.pretrained_reader import stored_sizes


class DryRun(NamedTuple):
    """What a map makes of stored names. `print()` shows it as a table."""

    rows: tuple[tuple[tuple[str, ...], str], ...]  # stored names, new name
    dropped: tuple[str, ...]  # stored names of which nothing is left

    def __str__(self) -> str:
        lines = [f"{' + '.join(old)} -> {new}" for old, new in self.rows]
        return "\n".join([*lines, *(f"{name} -> (left out)" for name in self.dropped)])


class KeyMap(KeyRules):
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

    def dry_run(
        self, source: str | os.PathLike[str] | Mapping[str, Sizes | None] | Iterable[str]
    ) -> DryRun:
        """Returns old and new names; `print()` shows them. Nothing is read but names and shapes.

        Args:
            source: path of a checkpoint or of safetensors files; or stored names, with their sizes
                or without, in which case shapes are not checked.

        Raises:
            PlanError: as a load with this map would.
            NotCommittedError, CorruptionError, StorageError: the path cannot be read.
        """
        stored: Mapping[str, Sizes | None]
        is_names = False
        if isinstance(source, (str, os.PathLike)):
            stored = stored_sizes(source)
        elif isinstance(source, Mapping):
            stored = source
        else:
            stored, is_names = dict.fromkeys(source), True
        entries = self.resolve(stored, tensors_only=is_names)
        rows = tuple((entry.sources, name) for name, entry in entries.items())
        used = {name for sources, _ in rows for name in sources}
        return DryRun(rows, tuple(name for name in stored if name not in used))
