"""One `resume` of a manager, with another attempt for each damaged checkpoint.

1. The coordinator chooses the newest whole checkpoint, or the caller's tag, and says what may be
   newer. It holds the readers' lock from here on, so that no retention removes the checkpoint.
2. `Wanted` raises for missing parts, and for values that were other ranks' own.
3. `dcpx.load` checks the checkpoint as a whole, then reads it. Behind the read it decodes and
   merges small values: all ranks raise an error of that before any part is filled on any.
4. The load fills model, optimizers and state, then scheduler, data loader and each rank's own
   values. All ranks raise an error of one, and none returns before.

Where bytes of the newest checkpoint are wrong:
5. Its load raises a `CorruptionError`, on which the ranks agree as on any error of a load.
6. All ranks pass it over and begin anew with the newest of the others. The coordinator notes the
   damaged one, so that retention keeps a good one in its place.
7. The next load overwrites all that the damaged read may have filled. Where it would not, or does
   not fit, the damage is the error: no rank goes on with parts of two checkpoints.

In a store no lock keeps another job's retention away: where the chosen checkpoint is removed before
its metadata is read, all ranks choose again. Later it is no matter, for its data stay for a grace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, NoReturn, TypeGuard

from torch_dcpx._arguments import check_bool
from torch_dcpx._text import counted, human_bytes, printable
from torch_dcpx.checkpoint.load import load_by
from torch_dcpx.checkpoint.load_checks import LoadRules
from torch_dcpx.checkpoint.same_call import Call, told_globs, told_rules
from torch_dcpx.errors import (
    CorruptionError,
    NotCommittedError,
    PlanError,
    UnsafePickleError,
    UnsupportedError,
)
from torch_dcpx.events import begun
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.manager.catalog import CheckpointCatalog
from torch_dcpx.manager.content import Merge, checked_merge
from torch_dcpx.manager.pointer import Tag, tag_of
from torch_dcpx.manager.state import Parts
from torch_dcpx.manager.stored import Skipped, Stored
from torch_dcpx.manager.translate import checked_translate
from torch_dcpx.manager.wanted import Wanted
from torch_dcpx.ranks.call_id import CallId, last_component
from torch_dcpx.ranks.members import told_to_next
from torch_dcpx.reader.pretrained_reader import stored_sizes
from torch_dcpx.reader.reader import quiet_reader
from torch_dcpx.reports import LoadReport, resumed_line
from torch_dcpx.storage.object_url import Location, location_of
from torch_dcpx.storage.visibility import is_of_another_save, note_saved

_MAX_SHOWN = 5  # names in one message
_MAX_TOLD = 3  # names in a line
_MAX_CHARS = 60  # of a name in a line
_MAX_REMOVED = 8  # checkpoints that another job removes, or replaces, under one resume
_PAUSE_S = 0.4  # for a node that sees a replaced one late

logger = logging.getLogger("torch_dcpx")


class PassedOver(NamedTuple):
    """A newer checkpoint that is damaged, though its files have their sizes."""

    tag: str
    file: str  # with wrong bytes
    reason: str


@dataclass(frozen=True)
class ResumeInfo:
    """The resumed checkpoint.

    Attributes:
        tag: of the checkpoint; None of a fresh start.
        step: of its save; None of a fresh start, and where no manager saved and the name is not
            "step-N": a "checkpoint-1000" has none.
        user_content: as it was saved; None if nothing was.
        metrics: of its save.
        report: of the load; None of a fresh start. Its `unexpected` names no item of the manager's
            own: a scheduler that was saved and not asked for is "lr_scheduler".
        skipped: (tag, reason) of directories on the way that are no whole checkpoints; and of whole
            ones that may be newer: of no manager, copies, renamed ones, those of another run.
        passed_over: newer checkpoints that are damaged, the newest first.
    """

    tag: str | None = None
    step: int | None = None
    user_content: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    report: LoadReport | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def is_fresh(self) -> bool:
        """Whether there was nothing to resume."""
        return self.tag is None

    def __str__(self) -> str:
        """Returns it in at most three lines: what was resumed, what of it was not, and what else is
        there.
        """
        lines = ["nothing to resume: a fresh start"]
        if self.tag is not None:
            step = "" if self.step is None else f" (step {self.step})"
            lines = [f"resumed '{self.tag}'{step}"]
        if self.report is not None:
            did = f"{counted(self.report.items, 'part')}, {human_bytes(self.report.nbytes)}"
            lines[0] += f": {did} in {self.report.total_s:.3g} s on this rank"
            kinds = ("missing", self.report.missing), ("not taken", self.report.unexpected)
            left = [_few(kind, names) for kind, names in kinds if names]
            lines += ["; ".join(left)] if left else []
        damaged, others = [over.tag for over in self.passed_over], [tag for tag, _ in self.skipped]
        tags = ("passed over as damaged", damaged), ("skipped", others)
        lines += ["; ".join(_few(kind, names) for kind, names in tags if names)]
        return "\n".join(printable(line) for line in lines if line)


def _few(kind: str, names: Sequence[str]) -> str:
    """Returns "2 missing: a, b" with the first names."""
    more = ", ..." if len(names) > _MAX_TOLD else ""
    texts = (name if len(name) <= _MAX_CHARS else f"{name[:_MAX_CHARS]}..." for name in names)
    return f"{len(names)} {kind}: {', '.join(islice(texts, _MAX_TOLD))}{more}"


@dataclass
class Resume:
    """One `CheckpointManager.resume` and its attempts: the same on every rank. Not thread-safe."""

    catalog: CheckpointCatalog
    parts: Parts
    tag: Tag | None
    strict: bool
    merge: Merge
    translate: Any
    fallback: bool
    allow_fresh: bool
    load_optimizer: bool
    allow_missing: Iterable[str]
    cast: Literal["error", "allow"]
    _passed: list[PassedOver] = field(default_factory=list)
    # Of the first damage. Not the error itself: its frames would keep the loaded values.
    _fields: dict[str, Any] = field(default_factory=dict)
    _handed: set[str] = field(default_factory=set)  # small parts that have values of a failed one
    _skipped: Skipped = ()
    _removed: int = 0  # chosen ones that were gone when they were to be read

    def run(self) -> ResumeInfo:
        """Returns the result of the first attempt that meets no damage.

        Raises CorruptionError: a checkpoint before a damaged one does not fit.
        """
        found = None
        while found is None:
            try:
                found = self._attempt()
            except (PlanError, UnsupportedError) as error:
                if self._passed:
                    self._raise(f"what was to take its place does not fit: {error}", error)
                raise
        return found

    def _attempt(self) -> ResumeInfo | None:
        """Resumes from one checkpoint; returns None where another one may do."""
        catalog, options = self.catalog, self.catalog.read_options
        with ExitStack() as stack:
            # `load_by` has an operation of its own: this one ends only where it is not reached.
            choosing = begun("dcpx.load", catalog.root.path)
            with choosing, catalog.exchange("resume", self.tag) as exchange:
                rank, world_size = exchange.rank, exchange.world_size
                rules, (chosen, self._skipped) = catalog.agree(
                    exchange, "choose", self._call, lambda calls, _: self._choose(calls, stack)
                )
            if chosen is None:
                if self._passed:
                    more = "".join(f"; '{tag}': {reason}" for tag, reason in self._skipped)
                    self._raise(f"there is no other whole checkpoint{more}")
                if rank == 0:
                    logger.info("nothing to resume in '%s': a fresh start", catalog.root.given)
                return ResumeInfo(skipped=self._skipped)
            note_saved(chosen.path, chosen.save_id)  # this node may see it late
            path = str(chosen.path)
            call = CallId("load", last_component(path))
            timeout_s = options.load_timeout_s
            told = told_to_next(**catalog.ranks, timeout_s=timeout_s, what="load", call=call)
            with begun("dcpx.load", path), told:
                loads = self._rules
                wanted = Wanted(
                    self.parts, chosen, rank, world_size, loads, self.merge, rules, options
                )
                target = wanted.target()
            try:
                report = load_by(
                    self._rules._replace(check_left=wanted.check_left),
                    target,
                    path,
                    storage_reader=quiet_reader(path, options),
                    key_map=wanted.rules,
                    is_repeated=False,
                    **catalog.ranks,
                )
            except BaseException as error:
                self._handed |= wanted.handed
                if self._is_removed(error) or self._passes_over(chosen, error, rank):
                    return None
                raise
            if self._passed:
                self._check_filled(wanted, report.missing)
        metrics, passed = wanted.record.metrics, tuple(self._passed)
        if rank == 0:
            logger.info(self._line(chosen, world_size))
        report = report.without_own()
        return ResumeInfo(
            chosen.tag, chosen.step, wanted.content, metrics, report, self._skipped, passed
        )

    def _line(self, chosen: Stored, world_size: int) -> str:
        """Returns the log's line of this resume."""
        record, root = chosen.record, self.catalog.root.given
        age_s = time.time() - record.saved_at if record is not None and record.saved_at else None
        ranks = None if record is None else record.ranks
        return resumed_line(chosen.told, root, age_s, ranks, world_size)

    def _call(self) -> tuple[KeyMap | None, Call]:
        """Returns the rules for the model's names, and this rank's call."""
        self.parts.check()
        self.parts.check_memory()
        check_bool("strict", self.strict)
        check_bool("load_optimizer", self.load_optimizer)
        check_bool("fallback", self.fallback)
        self._rules = LoadRules.of(self.strict, self.allow_missing, self.cast, "resume")
        self.allow_missing = self._rules.globs  # an iterator gives them once
        rules = checked_translate(self.translate, self.parts.model)
        arguments = {
            "tag": None if self.tag is None else tag_of(self.tag),
            "strict": self.strict,
            "allow_missing": told_globs(self._rules.globs),
            "cast": self.cast,
            "merge": checked_merge(self.merge),
            "translate": told_rules(rules),
            "fallback": self.fallback,
        }
        if self._passed:
            arguments["passed"] = self._passed_tags
        return rules, self.parts.call("resume", sorted(self.parts.per_rank), **arguments)

    def _choose(self, calls: list[Call], stack: ExitStack) -> tuple[Stored | None, Skipped]:
        """Returns the checkpoint of this attempt; on the coordinator."""
        if self._passed:
            self.catalog.root.tell_damaged()
        tag, passed = calls[0].arguments["tag"], self._passed_tags
        chosen = self.catalog.choose(tag, stack, passed, allow_fresh=self.allow_fresh)
        for skipped, _ in () if self.fallback else chosen[1]:
            with suppress(NotCommittedError):  # of a save that did not end
                self.catalog.root.examined(skipped)
        return chosen

    @property
    def _passed_tags(self) -> list[str]:
        return [over.tag for over in self._passed]

    def _is_removed(self, error: BaseException) -> bool:
        """Returns whether to choose again after this error, on which the ranks agree."""
        may_be_gone = self.tag is None and not self.catalog.root.files.has_locks
        is_gone = may_be_gone and isinstance(error, NotCommittedError)
        if not (is_gone or is_of_another_save(error)):
            return False
        self._removed += 1
        time.sleep(0.0 if is_gone else _PAUSE_S)
        return self._removed <= _MAX_REMOVED

    def _passes_over(self, chosen: Stored, error: BaseException, rank: int) -> bool:
        """Returns whether to try an older checkpoint after this error, on which the ranks agree."""
        if not is_damage(error, chosen.path):
            return False
        self.catalog.root.note_damaged(chosen.tag)
        if self.tag is not None or not self.fallback:
            return False
        over = PassedOver(chosen.tag, str(error.path), error.message)
        if not self._passed:
            self._fields = {name: getattr(error, name) for name in CorruptionError.FIELDS}
        self._passed.append(over)
        if rank == 0:
            logger.warning(
                "passed over checkpoint '%s' beneath '%s', for '%s' is damaged; the one before it "
                "is tried: %s",
                over.tag,
                self.catalog.root.path,
                over.file,
                over.reason,
            )
        return True

    def _check_filled(self, wanted: Wanted, missing: Sequence[str]) -> None:
        """Raises CorruptionError on all ranks if what this attempt left as it was, on any rank, may
        hold values of a damaged checkpoint; `missing` are the names that its load did not fill.
        """

        def check() -> None:
            left = sorted(self._handed - wanted.handed)
            for tag in self._passed_tags if missing or wanted.kept else ():
                sizes = stored_sizes(self.catalog.root.path / tag, self.catalog.read_options)
                left += wanted.held(missing, sizes)
            if left:
                names = ", ".join(dict.fromkeys(left[:_MAX_SHOWN]))
                self._raise(f"what was read in its place does not hold {names}")

        with self.catalog.exchange("resume") as exchange:
            exchange.all_reduce("fallback", check, lambda _: None)

    def _raise(self, why: str, cause: BaseException | None = None) -> NoReturn:
        damages = "; ".join(f"'{tag}' ('{file}': {text})" for tag, file, text in self._passed)
        raise CorruptionError(
            f"resume from '{self.catalog.root.path}': damaged: {damages}; {why}. What was to be "
            "filled may hold bytes of them; tag= takes a checkpoint by name",
            **self._fields,
        ) from cause


def is_damage(error: BaseException, path: Location) -> TypeGuard[CorruptionError]:
    """Returns whether bytes of a file of the checkpoint in `path` are wrong.

    No damage are a class on no list, names in the metadata that contradict each other, and a file
    that some `load_state_dict` reads elsewhere.
    """
    return (
        isinstance(error, CorruptionError)
        and not isinstance(error, UnsafePickleError)
        and error.path is not None
        and location_of(error.path).is_relative_to(path)
    )
