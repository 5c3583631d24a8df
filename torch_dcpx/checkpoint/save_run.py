"""One save of `save` or `async_save` on this rank: DCP's hooks, called by us.

plan                on the caller's thread, agreed with all ranks through the store
write_and_settle    on any thread, no collective: this rank's files, the vote, the commit

Planners and writers see the hooks of `torch.distributed.checkpoint.save`, in its order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx import _mounts
from torch_dcpx._answers import BOUND
from torch_dcpx._gc import paused_gc_of_many
from torch_dcpx._hooks import takes
from torch_dcpx._waiting import Deadline
from torch_dcpx.checkpoint.containers import add_record
from torch_dcpx.checkpoint.same_directory import Place, SameDirectory, Spread
from torch_dcpx.checkpoint.save_plan import PlanRound, SaveAnswer, SaveOffer
from torch_dcpx.checkpoint.sight import Seen, Sight, look_for
from torch_dcpx.checkpoint.stateful import with_state_dicts
from torch_dcpx.errors import DcpxError, OutcomeUnknownError, UnsupportedError
from torch_dcpx.metadata.file import stored_save_id
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.storage.lock_reach import check_reach
from torch_dcpx.storage.object_url import location_of
from torch_dcpx.storage.paths import AnyPath
from torch_dcpx.storage.running_save import RunningSave, driven
from torch_dcpx.storage.visibility import note_saved
from torch_dcpx.timelines import Timeline
from torch_dcpx.writer.writer import DcpxWriter


class Committed(NamedTuple):
    """A committed checkpoint, as the coordinator describes it to all ranks."""

    save_id: str
    ranks: int
    files: int
    file_bytes: int  # of all ranks, framing and checksums included
    replaced: str = ""  # id of the save whose place this one took, where nodes may still see it
    seen: Seen | None = None  # for ranks that look for it


def named(error: Exception) -> Exception:
    """Returns the error of a value that pickle refuses with its name; any other as it is."""
    fqn = getattr(error, "dcpx_fqn", None)
    if fqn is None or isinstance(error, (DcpxError, MemoryError, OSError)):
        return error
    text = UnsupportedError(
        f"'{fqn}' cannot be pickled: {type(error).__name__}: {error}; save what it is made of "
        "(numbers, texts, tensors, dicts and lists), or leave it out"
    )
    text.__cause__ = error
    return text


class SaveRun:
    """One save, until `end`. As a context manager it ends with the block."""

    def __init__(
        self,
        state_dict: dict[str, Any],
        path: AnyPath,
        writer: DcpxWriter,
        planner: SavePlanner,
        exchange: Exchange,
    ) -> None:
        self.path = os.fsdecode(path)
        self.writer = writer
        self.planner: Any = planner  # as long as its state is needed
        self.exchange = exchange
        exchange.place = self.path
        self.save_id = ""
        self.timeline = Timeline(
            exchange.call.name, path=self.path, rank=exchange.rank, is_of_call=True
        )
        self.timeline.operation_id = exchange.seal.hex()  # until the save has its id
        self._state_dict = state_dict
        self._begun: list[RunningSave] = []  # one, once the writer knows of it
        self._metadata: Any = None  # the coordinator's
        self._ballot: Ballot | None = None  # once all ranks have a plan
        self._looks = ""
        self._sight: Sight | None = None  # of the coordinator, where there are several nodes

    def plan(self, check: Callable[[], None]) -> SavePlan:
        """Returns this rank's final plan, agreed with all ranks. All raise an error of any rank.

        Args:
            check: called before anything else on this rank.
        """
        exchange = self.exchange
        group = exchange.rank, exchange.world_size, exchange.group
        planning = PlanRound(self.planner, self.writer, *group, given=self._state_dict)
        same_directory = SameDirectory(exchange)
        phase = self.timeline.phase

        is_one = exchange.world_size == 1

        def offer() -> tuple[SaveOffer, bytes]:
            with phase("plan"):
                check()
                # Here, so that the others learn of an error. Else they wait for this rank, and the
                # numbers of later operations are out of step.
                growing: set[str] = set()
                self._state_dict = with_state_dicts(self._state_dict, growing)
                self._set_up()
                add_record(self.planner, self._state_dict, growing)
                return planning.offer(), b"" if is_one else self._place().digest

        def answer(offers: list[SaveOffer]) -> list[SaveAnswer]:
            with phase("plan"):
                return planning.answer(self._begun[0].save_id, offers)

        def first_answer(brought: list[tuple[SaveOffer, bytes]]) -> list[SaveAnswer]:
            with phase("plan"):
                answers = answer([offer for offer, _ in brought])
                place, digests = self._place(), [digest for _, digest in brought]
                probe = same_directory.probe_for(place, digests)
                spread = Spread.of(digests)
                if spread.lookers and same_directory.are_together(place):
                    self._sight = Sight(place.directory, spread, self.writer.options)
                    answers = self._sight.asked(answers)
                return [each._replace(probe=probe) for each in answers] if probe else answers

        with phase("exchange"), paused_gc_of_many(), same_directory:
            own = exchange.reduce_scatter("plan", offer, first_answer)
            self._looks = own.looks
            if own.probe and not same_directory.check(self._place(), own.probe):
                self._looks, self._sight = "", None
            if self._sight is not None and self._place().needs_one:
                self._begun[0].hosts = self._sight.hosts
            if own.is_again:
                own = exchange.reduce_scatter("plan", planning.offer_again, answer)
            self._ballot = self._new_ballot()
            self._begun[0].check = self._ballot.check
            self.save_id = self._begun[0].save_id = own.save_id
            self.timeline.operation_id = self.save_id
            with phase("plan"):
                plan = planning.finish(own)
            self._metadata = planning.metadata
        self._state_dict = {}  # the planner has it as long as it needs it
        return plan

    def _place(self) -> Place:
        save, options = self._begun[0], self.writer.options
        location = save.directory or location_of(self.path, options.endpoint)
        needs_one = getattr(self.writer, "dcpx_needs_one_root", False)
        return Place(location, options.node_local, needs_one, save.made)

    def _set_up(self) -> None:
        writer, planner, is_coordinator = self.writer, self.planner, self.exchange.is_coordinator
        writer.reset(self.path)
        meta, state = writer.storage_meta(), self._state_dict
        if takes(planner.set_up_planner, "storage_meta"):
            planner.set_up_planner(
                state_dict=state, storage_meta=meta, is_coordinator=is_coordinator
            )
        else:
            warnings.warn(
                f"{type(planner).__name__}.set_up_planner takes no `storage_meta`, which DCP's "
                "SavePlanner has had since torch 2.3",
                stacklevel=2,
            )
            planner.set_up_planner(state, is_coordinator)
        more: dict[str, Any] = {}  # as in DCP: subclasses may have the signature of before
        if takes(writer.set_up_storage_writer, "kwargs"):
            more = {"rank": self.exchange.rank, "use_collectives": True}
        with driven() as self._begun:
            writer.set_up_storage_writer(is_coordinator, **more)
        self._begun[0].timeline = self.timeline

    def write_and_settle(self, take: Callable[[], tuple[SavePlan, Any]]) -> Committed:
        """Writes this rank's items, votes, and returns the checkpoint that the coordinator has
        committed. Raises the first error of any rank, or OutcomeUnknownError.

        Args:
            take: gives the plan of `plan`, and a planner, or the like, that gives its items' data.
                Called once, so that no other frame holds them while they are written.
        """
        ballot = self._ballot or self._new_ballot()
        try:
            self.exchange.note_phase("writing")
            if _mounts.HAS_SHARED and not self.exchange.is_coordinator:
                check_reach(self._place().directory)
            future = self.writer.write_data(*take())
            future.wait()
            results = future.value()
        except Exception as error:  # noqa: BLE001  (settle raises it, or an earlier one)
            ballot.fail(named(error))
        else:
            ballot.vote(results)
        with self.timeline.phase("vote"):
            committed = ballot.settle(self._commit, self._was_committed)
            committed = committed or Committed(self.save_id, self.exchange.world_size, 0, 0)
            note_saved(self._place().directory, self.save_id, committed.replaced)
            if committed.seen is not None:
                self.exchange.restart()
                self.exchange.all_reduce("visible", partial(self._look, committed.seen), len)
        return committed

    def _look(self, seen: Seen) -> None:
        """Looks for the commit, if this rank is the one of its node that does."""
        if self._looks == "looks":
            look_for(
                seen, self._place().directory, self.save_id, self.exchange, self.writer.options
            )

    def _new_ballot(self) -> Ballot:
        return Ballot(self.exchange, self.exchange.deadline.anew())

    def _commit(self, results: list[list[WriteResult]]) -> Committed:
        replaced = self._sight.replaced() if self._sight else ""
        self.writer.finish(self._metadata, results)
        files = [entry for rank in results for entry in getattr(rank, "files", ())]
        sizes = {entry.path: entry.nbytes for entry in files}
        seen = self._sight.seen(self.save_id, sizes) if self._sight else None
        return Committed(
            self.save_id, len(results), len(sizes), sum(sizes.values()), replaced, seen
        )

    def _was_committed(self) -> bool:
        if self._begun[0].is_unsure:  # what the storage shows now is not the last word
            raise OutcomeUnknownError("the store has not answered the commit")
        return stored_save_id(self._begun[0].directory or self.path) == self.save_id

    def cancel(self) -> bool:
        """Stops the save on all ranks, from any thread. Returns False once a commit is decided."""
        if self._ballot is None or not self._ballot.cancel():
            return False
        for save in self._begun:
            save.stop()
        return True

    def leave(self, deadline: Deadline) -> None:
        """Stops the save as this process ends: on all ranks, unless they can do without this one.
        Informs them until `deadline`.
        """
        for save in self._begun:
            save.stop()
        self.exchange.storage.note_interrupt()
        if self._ballot is not None:
            self._ballot.leave(deadline)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the save on this rank. The others learn of an `error`, and this rank removes its
        files, unless the coordinator may yet publish them.
        """
        if error is not None:
            self.timeline.fail(error)
            (self._ballot or self.exchange).fail(error)
            may_be_published = self._ballot is not None and self._ballot.may_be_committed
            for save in self._begun:
                abandon_save(self.writer, save, removes_files=not may_be_published)
        self.exchange.close()
        self.timeline.end()

    def __enter__(self) -> SaveRun:
        self._bound = BOUND.set(self.exchange.storage)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.end(error)
        finally:
            BOUND.reset(self._bound)


def abandon_save(writer: DcpxWriter, save: RunningSave, *, removes_files: bool) -> None:
    """Ends `save`, not committed: frees its locks and the writer, unless that has begun another.

    `removes_files` removes this rank's files that no metadata names: never while the coordinator
    may still publish them.
    """
    own: Any = writer
    if own._DcpxWriter__save in (None, save):
        if removes_files:
            own._DcpxWriter__remove_unpublished()
        own._DcpxWriter__release()
