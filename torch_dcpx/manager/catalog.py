"""The checkpoints beneath a root: the coordinator reads and changes them for all ranks.

`export` and `dry_run` hold the readers' lock of the checkpoint, so that no retention removes it.
"""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections import UserDict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from torch import nn

from torch_dcpx._text import counted
from torch_dcpx.artifacts.arguments import ExportArguments, checked_arguments
from torch_dcpx.artifacts.export import ExportReport, export
from torch_dcpx.checkpoint.same_call import Call, check_same_call, told_rules
from torch_dcpx.errors import (
    ConcurrentSaveError,
    DcpxError,
    MismatchError,
    NotCommittedError,
    OptionError,
    StorageError,
    UnsupportedError,
)
from torch_dcpx.keys.key_map import DryRun, KeyMap
from torch_dcpx.manager.known import check_found, check_none_silent, is_apart, is_removed
from torch_dcpx.manager.pointer import Tag, tag_of, tag_or_none
from torch_dcpx.manager.preemption import Preemption, check_signals
from torch_dcpx.manager.retention import Retention
from torch_dcpx.manager.root import ManagerRoot
from torch_dcpx.manager.state import ModelPart
from torch_dcpx.manager.stored import Skipped, Stored
from torch_dcpx.manager.translate import MODEL, beneath, checked_translate
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.members import exchange_for, keys_for
from torch_dcpx.reader.pretrained_reader import stored_sizes
from torch_dcpx.storage.names import (
    METADATA_NAME,
    POINTER_NAME,
    TRASH_PREFIX,
    is_pointer_temporary,
)
from torch_dcpx.storage.visibility import look_until_seen

_T = TypeVar("_T")
_Own = TypeVar("_Own")

logger = logging.getLogger("torch_dcpx")

_NEED_TAG = frozenset({"save", "pin", "unpin", "delete"})
_MAX_SHOWN = 8  # names in one message
_MAX_CHOICES = 8  # while others delete the chosen checkpoint


@dataclass
class CheckpointCatalog:
    """The checkpoints beneath one root. Every rank makes every call. Belongs to one process."""

    root: ManagerRoot
    retention: Retention
    ranks: dict[str, Any]  # `process_group` and `no_dist`
    options: WriteOptions
    read_options: ReadOptions
    is_closed: bool = False
    _pid: int = field(default_factory=os.getpid)

    # ---- With all ranks ------------------------------------------------------------------------

    def exchange(self, what: str, tag: Any = None, timeout_s: float | None = None) -> Exchange:
        """Begins an operation of all ranks; the default timeout is that of loads."""
        has_tag = tag is not None or what in _NEED_TAG
        name = tag_or_none(tag) if has_tag else self.root.path.name
        call = CallId(f"CheckpointManager.{what}", name, is_write=what in ("save", "export"))
        seconds = self.read_options.load_timeout_s if timeout_s is None else timeout_s
        exchange = exchange_for(**self.ranks, timeout_s=seconds, what=what, call=call)
        exchange.place = str(self.root.path)
        return exchange

    def agree(
        self,
        exchange: Exchange,
        step: str,
        local: Callable[[], tuple[_Own, Call]],
        reduce: Callable[[list[Call], _Own], _T],
    ) -> tuple[_Own, _T]:
        """Compares the ranks' calls; returns this rank's own value and the coordinator's answer.

        `local` returns a rank's own value and its call; `reduce` makes the answer of the equal
        calls and the coordinator's value. Raises: as `check_same_call` and `Exchange.all_reduce`;
        where the manager is closed, or another process'.
        """
        own: _Own

        def call() -> Call:
            nonlocal own
            self._check_usable()
            own, its_call = local()
            return its_call

        def answer(calls: list[Call]) -> _T:
            check_same_call(calls)
            return reduce(calls, own)

        answered = exchange.all_reduce(step, call, answer)
        return own, answered

    def on_coordinator(self, name: str, tag: Any, work: Callable[[Any], _T]) -> _T:
        """Runs work on the coordinator; all ranks get the answer or the error."""
        with self.exchange(name, tag) as exchange:
            return self.agree(
                exchange,
                name,
                lambda: (None, Call(name, {"tag": tag_of(tag)} if name in _NEED_TAG else {})),
                lambda calls, _: work(calls[0].arguments.get("tag")),
            )[1]

    def watch(
        self,
        signals: Sequence[int],
        time_left_s: float | None,
        last_save_s: Callable[[], float | None],
    ) -> Preemption:
        """As `CheckpointManager.save_on_signal`; `last_save_s` returns the last save's seconds."""

        def local() -> tuple[None, Call]:
            check_signals(signals, time_left_s)
            return None, Call("save_on_signal", {})

        with self.exchange("save_on_signal") as exchange:
            name = self.agree(exchange, "name", local, lambda *_: uuid.uuid4().hex)[1]
            watch = Preemption(
                *keys_for(**self.ranks, what="save on a signal", name=f"signals/{name}"),
                timeout_s=self.options.save_timeout_s,
                time_left_s=time_left_s,
                last_save_s=last_save_s,
            )
            watch.watch_on_all(signals, exchange)
        return watch

    def close(self) -> bool:
        """Refuses every later call. Returns False in a process that was forked from the owner."""
        is_own = os.getpid() == self._pid
        self.is_closed = self.is_closed or is_own
        return is_own

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UnsupportedError(
                f"this manager belongs to process {self._pid}, which process {os.getpid()} was "
                "forked from: only the parent can use it"
            )
        if self.is_closed:
            raise OptionError("this manager is closed: make a new one")

    # ---- CheckpointManager's methods, on the coordinator ---------------------------------------

    def pin(self, name: str) -> None:
        self.root.files.is_there(name, "pin")
        # A save looks for pins, and commits, in one go.
        with self.root.one_commit(f"pin '{self.root.path / name}'"):
            self.root.examined(name)
            self.root.files.pin(name)

    def unpin(self, name: str) -> None:
        self.root.files.unpin(name)

    def delete(self, name: str) -> None:
        self.retention.wait_for_run(f"delete '{self.root.path / name}'")
        root, path = self.root, self.root.path / name
        root.files.is_there(name, "delete")
        going = root.examined(name)
        self.retention.refuse_pinned(name, "delete")
        if name in self.retention.busy:
            problem = f"delete '{path}': a save to it is under way; wait for it"
            raise ConcurrentSaveError(problem, errno=errno.EBUSY, path=str(path))
        successor = self._successor(name)
        with ExitStack() as held:
            if successor is not None:  # another job must not change the pointer as well
                held.enter_context(root.held(self.read_options.load_timeout_s))
                successor = self._successor(name)
            if successor is not None:  # first: what the pointer names is known to be there
                root.point_away(name, successor)
            try:
                root.remove(name)
            except DcpxError:
                with suppress(StorageError):  # the error that counts is that of the removal
                    if successor is not None and root.files.identity(name) is not None:
                        root.point_away(successor.tag, going)
                raise

    def tags(self) -> list[str]:
        stored, skipped = self.root.listed()
        if is_apart(self.root):
            self.root.warn([row for row in skipped if not is_removed(self.root, row[0])])
        return [each.tag for each in reversed(stored)]

    def newest(self) -> Stored | None:
        """Returns the newest of the root. Raises StorageError: as `check_found`, where other nodes
        mount it.
        """
        root = self.root
        return (self._newest((), allow_fresh=False) if is_apart(root) else root.newest())[0]

    def _successor(self, name: str) -> Stored | None:
        """Returns what is the newest once the newest goes; None if this is another one.

        Raises UnsupportedError: it is the last one. StorageError: as `check_none_silent`.
        """
        root = self.root
        newest = self.newest()  # anew: other jobs may have changed the root
        stored, skipped = root.listed()
        good = {each.tag for each in stored if each.save_id not in root.damaged}
        others = [each for each in stored if each.tag != name]
        if not others or good == {name}:
            check_none_silent(root, name, skipped)
            kind = " that is not damaged" if others else ""
            raise UnsupportedError(
                f"delete '{root.path / name}': it is the last whole checkpoint beneath "
                f"'{root.path}'{kind}; remove the directory by hand, and '{POINTER_NAME}' beside it"
            )
        if newest is None or newest.tag != name:
            return None
        return next((each for each in others if each.tag in good), others[0])

    def choose(
        self, tag: str | None, stack: ExitStack, passed: Collection[str] = (), *, allow_fresh: bool
    ) -> tuple[Stored | None, Skipped]:
        """Returns a checkpoint to read, and keeps it from deletion until the stack ends.

        Without a tag it is the newest but those that `passed` names. Where nothing is whole it is
        None with `allow_fresh`, else an error.
        """
        root = self.root
        self.retention.wait_for_run(f"read '{root.path}'")  # else it may remove the chosen one
        for _ in range(_MAX_CHOICES):
            if tag is None:
                stored, skipped = self._newest(passed, allow_fresh=allow_fresh)
            else:
                stored, skipped = root.examined(tag), ()
            if stored is None:
                if not allow_fresh and not passed:
                    _check_fresh(root, skipped)
                return None, skipped
            stack.enter_context(root.files.reading(stored.tag))
            if root.files.identity(stored.tag) is not None:
                doubts = root.doubts(stored, passed) if tag is None else ()
                return stored, skipped + doubts
        path = str(root.path)
        problem = f"resume from '{path}': checkpoints are deleted faster than one can be chosen"
        raise NotCommittedError(problem, errno=errno.ESTALE, path=path)

    def _newest(
        self, passed: Collection[str], *, allow_fresh: bool
    ) -> tuple[Stored | None, Skipped]:
        """Returns the newest of the root, once this node sees what is known to be there.

        Raises StorageError: as `check_found`.
        """
        root = self.root

        def look() -> tuple[Stored | None, Skipped]:
            stored, skipped = root.newest_but(passed) if passed else root.newest()
            check_found(root, stored, skipped, passed, allow_fresh=allow_fresh)
            return stored, skipped

        visible_s = self.read_options.visible_s
        return look_until_seen(root.path, visible_s, look, is_known=True)

    # ---- CheckpointManager's methods, on all ranks ---------------------------------------------

    def export(
        self,
        tag_or_model: Tag | nn.Module,
        given: tuple[Any, ...],
        options: WriteOptions | None,
    ) -> ExportReport:
        """As `CheckpointManager.export`; `given` are the arguments of `checked_arguments`."""
        with ExitStack() as stack:

            def local() -> tuple[ExportArguments, Call]:
                own = checked_arguments(*given)
                tag = None if isinstance(tag_or_model, nn.Module) else tag_of(tag_or_model)
                return own, Call("export", {"tag": tag, **own.told()})

            def reduce(calls: list[Call], own: ExportArguments) -> str | None:
                tag = calls[0].arguments["tag"]
                chosen = None if tag is None else self.choose(tag, stack, allow_fresh=False)[0]
                if chosen is None:
                    return None
                record, its_path = chosen.record, str(chosen.path)
                if own.keys is None and record is not None and "model" not in record.parts:
                    held = ", ".join(record.parts) or "nothing"
                    raise MismatchError(
                        f"export '{its_path}': no model was saved there, but {held}; keys= names "
                        "what to export",
                        path=its_path,
                    )
                return its_path

            with self.exchange("export") as exchange:
                checked, stored = self.agree(exchange, "export", local, reduce)
            path, file_format, _, _, _, dtype, metadata, overwrite, config, merge_lora = given
            return export(
                _Live(tag_or_model) if stored is None else stored,
                path,
                format=file_format,
                keys=checked.keys,
                key_map=checked.key_map,
                max_shard_bytes=checked.max_shard_bytes,
                dtype=dtype,
                metadata=metadata,
                overwrite=overwrite,
                config=config,
                merge_lora=merge_lora,
                options=options or self.options,
                **self.ranks,
            )

    def dry_run(self, translate: Any, tag: Tag | None) -> DryRun:
        with ExitStack() as stack:

            def local() -> tuple[KeyMap, Call]:
                rules = checked_translate(translate, True)
                if rules is None:
                    raise OptionError("dry_run needs a translate to try", option="translate")
                named = None if tag is None else tag_of(tag)
                return rules, Call("dry_run", {"tag": named, "translate": told_rules(rules)})

            def reduce(calls: list[Call], rules: KeyMap) -> DryRun:
                chosen, _ = self.choose(calls[0].arguments["tag"], stack, allow_fresh=False)
                if chosen is None:
                    path = str(self.root.path)
                    problem = f"dry_run: nothing lies beneath '{path}'"
                    raise NotCommittedError(problem, errno=errno.ENOENT, path=path)
                sizes = stored_sizes(chosen.path, self.read_options)
                return rules.dry_run(beneath(MODEL, sizes.items()))

            with self.exchange("dry_run") as exchange:
                return self.agree(exchange, "dry_run", local, reduce)[1]


def _check_fresh(root: ManagerRoot, skipped: Skipped) -> None:
    """Raises NotCommittedError where a root without a whole checkpoint may hold parts of one.

    Files and directories that no save has made do not count.
    """
    files = root.files
    names = [n for n in files.names() if n != POINTER_NAME and not n.startswith(TRASH_PREFIX)]
    names = [n for n in names if not is_pointer_temporary(n) and not files.is_foreign(n)]
    if METADATA_NAME in names:
        raise NotCommittedError(
            f"resume from '{root.path}': it is a checkpoint itself; the root of a manager is "
            f"the directory above, here '{root.path.parent}'",
            errno=errno.ENOENT,
            path=str(root.path),
        )
    if names:
        reasons = dict(skipped)
        shown = [f"'{n}' ({reasons.get(n, 'no checkpoint')})" for n in names[:_MAX_SHOWN]]
        more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
        entries = counted(len(names), "entry", "entries")
        raise NotCommittedError(
            f"resume from '{root.path}': none of {entries} is a whole checkpoint: "
            f"{', '.join(shown)}{more}; CheckpointManager(..., allow_fresh=True) starts anew "
            "all the same",
            errno=errno.ENOENT,
            path=str(root.path),
        )


class _Live(UserDict[str, Any]):
    """A module's state, made by the export, where all ranks raise an error of it."""

    def __init__(self, model: Any) -> None:
        self._part = ModelPart(model)

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        return self._part.state_dict()
