"""The checkpoints beneath a root: the coordinator looks at them and changes them, for all ranks.

`agree` compares the ranks' calls, and the coordinator answers for all of them. `export` and
`dry_run` hold the readers' lock of the checkpoint, so that nobody's retention takes it away
meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from torch_dcpx.artifacts.arguments import ExportArguments, checked_arguments
from torch_dcpx.artifacts.export import ExportReport, export
from torch_dcpx.checkpoint.same_call import Call, check_same_call, told_rules
from torch_dcpx.errors import (
    ConcurrentSaveError,
    MismatchError,
    NotCommittedError,
    OptionError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.keys.key_map import DryRun, KeyMap
from torch_dcpx.manager.pointer import tag_of, tag_or_none
from torch_dcpx.manager.removal import remove_checkpoint
from torch_dcpx.manager.retention import Retention
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.state import ModelPart
from torch_dcpx.manager.stored import OwnDirectory, Skipped, Stored, identity_of, lies_there
from torch_dcpx.manager.translate import MODEL, checked_translate
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.reader.pretrained_reader import stored_sizes
from torch_dcpx.storage.names import PIN_NAME
from torch_dcpx.storage.reader_lock import being_read, make_readers_file

_T = TypeVar("_T")
_Own = TypeVar("_Own")

logger = logging.getLogger("torch_dcpx")

_MAX_CHOICES = 8  # while others delete the chosen checkpoint


@dataclass
class CheckpointCatalog:
    """The checkpoints beneath one root. Every rank makes every call. Belongs to one process.

    It touches nothing before the first call; group and options are those of CheckpointManager.
    """

    root: ManagerRoot
    retention: Retention
    group: Any
    no_dist: bool
    options: WriteOptions
    read_options: ReadOptions
    _is_closed: bool = False
    _pid: int = field(default_factory=os.getpid)

    # ---- With all ranks ------------------------------------------------------------------------

    def exchange(self, what: str, tag: Any = None, timeout_s: float | None = None) -> Exchange:
        """Begins an operation of all ranks; the default timeout is that of loads."""
        name = self.root.path.name if tag is None else tag_or_none(tag)
        call = CallId(f"CheckpointManager.{what}", name, is_write=what in ("save", "export"))
        seconds = self.read_options.load_timeout_s if timeout_s is None else timeout_s
        return exchange_for(self.group, self.no_dist, seconds, what, call)

    def agree(
        self,
        exchange: Exchange,
        step: str,
        local: Callable[[], tuple[_Own, Call]],
        reduce: Callable[[list[Call], _Own], _T],
    ) -> tuple[_Own, _T]:
        """Compares the ranks' calls, and has the coordinator answer for all of them.

        Args:
            exchange: of the ranks.
            step: its name.
            local: makes, on each rank, a value of its own and its call.
            reduce: makes, on the coordinator, the answer of all calls, which are the same, and of
                the coordinator's own value.

        Returns:
            This rank's own value, and the coordinator's answer.

        Raises:
            UnsupportedError, OptionError: this process cannot use the manager.
            PlanError: ranks made different calls.
            As `Exchange.all_reduce`.
        """
        own: _Own

        def call() -> Call:
            nonlocal own
            self._check_usable()
            own, told = local()
            return told

        def answer(calls: list[Call]) -> _T:
            check_same_call(calls)
            return reduce(calls, own)

        answered = exchange.all_reduce(step, call, answer)
        return own, answered

    def on_coordinator(self, name: str, tag: Any, work: Callable[[Any], _T]) -> _T:
        """Has the coordinator do work that all ranks ask for; all get the answer or the error."""

        def local() -> tuple[None, Call]:
            return None, Call(name, {} if tag is None else {"tag": tag_of(tag)})

        def reduce(calls: list[Call], _: None) -> _T:
            return work(calls[0].arguments.get("tag"))

        with self.exchange(name, tag) as exchange:
            return self.agree(exchange, name, local, reduce)[1]

    def close(self) -> bool:
        """Refuses every later call. Returns False in a process that was forked from the owner."""
        is_own = os.getpid() == self._pid
        self._is_closed = self._is_closed or is_own
        return is_own

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UnsupportedError(
                f"this manager belongs to process {self._pid}, which process {os.getpid()} was "
                "forked from: only the parent can use it"
            )
        if self._is_closed:
            raise OptionError("this manager is closed: make a new one", option=None, value=None)

    # ---- On the coordinator --------------------------------------------------------------------

    def pin(self, name: str) -> None:
        """Puts the mark into a directory that keeps it from deletion."""
        lies_there(self.root.path / name, "pin")
        path = self.root.examined(name).path
        with OwnDirectory(path, "pin") as directory:
            try:
                make_readers_file(path, dir_fd=directory.fd)
            except StorageError as error:
                logger.debug("%s: pinned without a lock", error)
            with being_read(path) as is_left_alone:
                # A deletion looks for the mark under the same lock.
                if not is_left_alone or identity_of(path) is None:
                    raise ConcurrentSaveError(
                        f"pin '{path}': it is being deleted", errno=errno.EBUSY, path=str(path)
                    )
                if not directory.is_regular(PIN_NAME):
                    directory.create(PIN_NAME, [], is_durable=self.root.is_durable)
                    directory.sync()

    def unpin(self, name: str) -> None:
        """Takes the mark away."""
        with OwnDirectory(self.root.path / name, "unpin") as directory:
            directory.unlink(PIN_NAME)
            directory.sync()

    def delete(self, name: str) -> None:
        """Removes a checkpoint that is neither pinned, nor saved to, nor the last good one."""
        self.retention.wait()
        root, path = self.root, self.root.path / name
        lies_there(path, "delete")
        root.examined(name)
        if self.retention.is_pinned(name):
            raise UnsupportedError(f"delete '{path}': it is pinned; unpin it first")
        if name in self.retention.busy:
            raise ConcurrentSaveError(
                f"delete '{path}': a save to it is under way; wait for it",
                errno=errno.EBUSY,
                path=str(path),
            )
        newest, _ = root.newest()  # anew: what lies there now
        stored = root.listed()[0]
        good = {each.tag for each in stored if each.save_id not in root.damaged}
        others = [each for each in stored if each.tag != name]
        if not others or good == {name}:
            raise UnsupportedError(
                f"delete '{path}': it is the last whole checkpoint beneath "
                f"'{root.path}'{' that is not damaged' if others else ''}; remove the "
                "directory by hand"
            )
        remove_checkpoint(root, name)
        if newest is not None and newest.tag == name:
            root.point_away(name, next((o for o in others if o.tag in good), others[0]))

    def choose(
        self,
        tag: str | None,
        stack: ExitStack,
        passed: Collection[str] = (),
        *,
        allow_fresh: bool,
    ) -> tuple[Stored | None, Skipped]:
        """Returns the checkpoint that is resumed, and keeps it from deletion until the stack ends.

        Args:
            tag: that the caller named. None: the newest.
            stack: holds the lock.
            passed: tags that a resume has passed over; none of them is chosen. Default (): none.
            allow_fresh: whether nothing is chosen where nothing is whole.
        """
        root = self.root
        self.retention.wait()  # what it removes is not to be chosen
        for _ in range(_MAX_CHOICES):
            skipped: Skipped = ()
            stored: Stored | None
            if tag is not None:
                stored = root.examined(tag)
            else:
                stored, skipped = root.newest_but(passed) if passed else root.newest()
            if stored is None:
                if not allow_fresh and not passed:
                    root.check_fresh(skipped)
                return None, skipped
            try:
                make_readers_file(stored.path)
            except StorageError as error:
                logger.debug("%s: read without a lock", error)
            stack.enter_context(being_read(stored.path))
            if identity_of(stored.path) is not None:
                return stored, skipped
        raise NotCommittedError(
            f"resume from '{root.path}': checkpoints are deleted faster than one can be chosen",
            errno=errno.ESTALE,
            path=str(root.path),
        )

    # ---- Handed out ----------------------------------------------------------------------------

    def export(
        self,
        tag_or_model: str | int | nn.Module,
        path: str | os.PathLike[str],
        file_format: Any,
        keys: Iterable[str] | None,
        key_map: KeyMap | None,
        max_shard_bytes: int | str,
        options: WriteOptions | None,
    ) -> ExportReport:
        """Does `CheckpointManager.export`."""
        with ExitStack() as stack:

            def local() -> tuple[ExportArguments, Call]:
                own = checked_arguments(path, file_format, keys, key_map, max_shard_bytes)
                is_model = isinstance(tag_or_model, nn.Module)
                tag = None if is_model else tag_of(tag_or_model)
                return own, Call("export", {"tag": tag, **own.told()})

            def reduce(calls: list[Call], own: ExportArguments) -> str | None:
                tag = calls[0].arguments["tag"]
                chosen = None if tag is None else self.choose(tag, stack, allow_fresh=False)[0]
                if chosen is None:
                    return None
                if own.keys is None:
                    _check_model(chosen)
                return str(chosen.path)

            with self.exchange("export") as exchange:
                checked, stored = self.agree(exchange, "export", local, reduce)
            source: Any = _Live(tag_or_model) if stored is None else stored
            return export(
                source, path, format=file_format, keys=checked.keys, key_map=checked.key_map,
                max_shard_bytes=checked.max_shard_bytes, process_group=self.group,
                no_dist=self.no_dist, options=options or self.options,
            )  # fmt: skip

    def dry_run(self, translate: Any, tag: str | int | None) -> DryRun:
        """Does `CheckpointManager.dry_run`."""
        with ExitStack() as stack:

            def local() -> tuple[KeyMap, Call]:
                found = checked_translate(translate, True)
                if found is None:
                    raise OptionError(
                        "dry_run needs a translate to try", option="translate", value=None
                    )
                named = None if tag is None else tag_of(tag)
                return found, Call("dry_run", {"tag": named, "translate": told_rules(found)})

            def reduce(calls: list[Call], rules: KeyMap) -> DryRun:
                chosen, _ = self.choose(calls[0].arguments["tag"], stack, allow_fresh=False)
                if chosen is None:
                    raise NotCommittedError(
                        f"dry_run: nothing lies beneath '{self.root.path}'",
                        errno=errno.ENOENT,
                        path=str(self.root.path),
                    )
                model = {
                    name.removeprefix(MODEL): size
                    for name, size in stored_sizes(str(chosen.path)).items()
                    if name.startswith(MODEL)
                }
                return rules.dry_run(model)

            with self.exchange("dry_run") as exchange:
                return self.agree(exchange, "dry_run", local, reduce)[1]


class _Live(Mapping[str, Any]):
    """A module's state, made where an error of it is raised on all ranks."""

    def __init__(self, model: Any) -> None:
        self._part = ModelPart(model)

    @cached_property
    def _state(self) -> dict[str, Any]:
        return self._part.state_dict()

    def __getitem__(self, name: str) -> Any:
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _check_model(chosen: Stored) -> None:
    """Raises MismatchError where a manager saved no model, and the caller names no keys."""
    if chosen.record is not None and "model" not in chosen.record.parts:
        held = ", ".join(chosen.record.parts) or "nothing"
        raise MismatchError(
            f"export '{chosen.path}': no model was saved there, but {held}; keys= names what to "
            "export",
            path=str(chosen.path),
        )
