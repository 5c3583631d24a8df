"""What a manager hands out of a checkpoint: an artifact, and what a KeyMap makes of its names.

Both hold the readers' lock of the checkpoint, so that nobody's retention takes it away meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

from torch import nn

from torch_dcpx.artifacts.arguments import ExportArguments, checked_arguments
from torch_dcpx.artifacts.export import ExportReport, export
from torch_dcpx.checkpoint.call_agreement import Call, check_same_call, told_rules
from torch_dcpx.errors import MismatchError, NotCommittedError, OptionError
from torch_dcpx.keys.key_map import DryRun, KeyMap
from torch_dcpx.keys.rules import KeyRules
from torch_dcpx.manager.catalog import CheckpointCatalog
from torch_dcpx.manager.pointer import tag_of
from torch_dcpx.manager.state import ModelPart
from torch_dcpx.manager.translate import MODEL, checked_translate
from torch_dcpx.manager.wanted import Chosen
from torch_dcpx.options import WriteOptions
from torch_dcpx.reader.pretrained_reader import stored_sizes


class ExportingCatalog(CheckpointCatalog):
    """A root whose checkpoints, and live models, are exported. Belongs to one process."""

    def export(
        self,
        tag_or_model: str | int | nn.Module,
        path: str | os.PathLike[str],
        *,
        format: Literal["safetensors", "torch"] = "safetensors",  # noqa: A002 - as `dcpx.export`
        keys: Iterable[str] | None = None,
        key_map: KeyRules | None = None,
        max_shard_bytes: int | str = "5GB",
        options: WriteOptions | None = None,
    ) -> ExportReport:
        """Writes one artifact for inference, by all ranks at once.

        Args:
            tag_or_model: a checkpoint by tag or step, which is kept from deletion meanwhile; or a
                module as it is now, by the names that a checkpoint of it would have.
            path: directory, or the file in it, of the artifact; the same on every rank.
            format, keys, key_map, max_shard_bytes: as `torch_dcpx.export`. Default: the model only,
                as safetensors. Of a tag, `keys` are names with "model.", "optimizer." and so on.
            options: of the export. Default None: those of the manager.

        Returns:
            What was written.

        Raises:
            NotCommittedError, and others: the tag is not there, or not whole.
            MismatchError: the checkpoint holds no model, and `keys` is None.
            OptionError: an argument that cannot work.
            PlanError: ranks made different calls; nothing was written.
            As `torch_dcpx.export`.
        """
        checked: list[ExportArguments] = []
        with ExitStack() as stack:

            def local() -> Call:
                self._check_usable()
                own = checked_arguments(path, format, keys, key_map, max_shard_bytes)
                checked.append(own)
                is_model = isinstance(tag_or_model, nn.Module)
                source = None if is_model else tag_of(tag_or_model)
                return Call("export", {"tag": source, **own.told()})

            def reduce(calls: list[Call]) -> str | None:
                tag = check_same_call(calls).arguments["tag"]
                if tag is None:
                    return None
                chosen = self._choose(tag, stack, allow_fresh=False)
                if checked[0].keys is None:
                    _check_model(chosen)
                return chosen.path

            with self._exchange("export") as exchange:
                stored = exchange.all_reduce("export", local, reduce)
            source: Any = _Live(tag_or_model) if stored is None else stored
            return export(
                source, path, format=format, keys=checked[0].keys, key_map=checked[0].key_map,
                max_shard_bytes=checked[0].max_shard_bytes, process_group=self._group,
                no_dist=self._no_dist, options=options or self._options,
            )  # fmt: skip

    def dry_run(
        self,
        translate: KeyRules | Callable[[str], str | None],
        tag: str | int | None = None,
    ) -> DryRun:
        """Returns what `resume(translate=)` would make of the model's names. Loads nothing.

        Args:
            translate: as in `resume`.
            tag: which checkpoint. Default None: the newest.

        Returns:
            Stored and new names, both without "model."; `print()` shows them.

        Raises:
            PlanError: the rules do not fit what is stored, or ranks made different calls.
            NotCommittedError, and others: nothing whole is there, or not the tag.
            OptionError: `translate` is no KeyMap and no function.
        """
        rules: list[KeyRules] = []
        with ExitStack() as stack:

            def local() -> Call:
                self._check_usable()
                found = checked_translate(translate, True)
                if found is None:
                    raise OptionError(
                        "dry_run needs a translate to try", option="translate", value=None
                    )
                rules.append(found)
                named = None if tag is None else tag_of(tag)
                return Call("dry_run", {"tag": named, "translate": told_rules(found)})

            def reduce(calls: list[Call]) -> DryRun:
                named = check_same_call(calls).arguments["tag"]
                chosen = self._choose(named, stack, allow_fresh=False)
                if chosen.tag is None:
                    raise NotCommittedError(
                        f"dry_run: nothing lies beneath '{self.root}'",
                        errno=errno.ENOENT,
                        path=str(self.root),
                    )
                model = {
                    name.removeprefix(MODEL): size
                    for name, size in stored_sizes(chosen.path).items()
                    if name.startswith(MODEL)
                }
                return KeyMap(*rules[0].rules, wrappers=rules[0].wrappers).dry_run(model)

            with self._exchange("dry_run") as exchange:
                found: DryRun = exchange.all_reduce("dry_run", local, reduce)
        return found


class _Live(Mapping[str, Any]):
    """A module's state, asked for where an error of it is told to all ranks."""

    def __init__(self, model: Any) -> None:
        self._part = ModelPart(model)
        self._state: dict[str, Any] | None = None

    def _asked(self) -> dict[str, Any]:
        if self._state is None:
            self._state = self._part.state_dict()
        return self._state

    def __getitem__(self, name: str) -> Any:
        return self._asked()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._asked())

    def __len__(self) -> int:
        return len(self._asked())


def _check_model(chosen: Chosen) -> None:
    """Raises MismatchError where a manager saved no model, and nothing else is asked for."""
    if chosen.record is not None and "model" not in chosen.record.parts:
        held = ", ".join(chosen.record.parts) or "nothing"
        raise MismatchError(
            f"export '{chosen.path}': no model was saved there, but {held}; keys= names what to "
            "export",
            path=chosen.path,
        )
