"""One save of `save` or `async_save` on this rank: DCP's hooks, called by us.

plan                on the caller's thread, agreed with all ranks through the store
write_and_settle    on any thread, no collective: this rank's files, the vote, the commit

The hooks and their order are those of `torch.distributed.checkpoint.save`, so that planners and
writers need not know who calls them.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torch_dcpx._gc import paused_gc_of_many
from torch_dcpx._waiting import Deadline
from torch_dcpx.checkpoint.same_directory import Place, SameDirectory
from torch_dcpx.checkpoint.save_plan import PlanRound, SaveAnswer, SaveOffer
from torch_dcpx.checkpoint.stateful import with_state_dicts
from torch_dcpx.metadata.file import stored_save_id
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.storage.paths import AnyPath
from torch_dcpx.storage.running_save import RunningSave, driven
from torch_dcpx.writer.writer import DcpxWriter, abandon_save


class Committed(NamedTuple):
    """A checkpoint that is there, as the coordinator tells all ranks."""

    save_id: str
    ranks: int
    files: int
    file_bytes: int  # of all ranks, framing and checksums included


class _LookFirst(NamedTuple):
    """The answer where paths differ: each rank looks at its directory before it goes on."""

    probe: str
    answer: SaveAnswer


class SaveRun:
    """One save, until `end`. As a context manager, the end of the block is its end."""

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
        self.planner: Any = planner  # until nobody needs the state any more
        self.exchange = exchange
        self.save_id = ""
        self._phase = "planning"
        self._state_dict = state_dict
        self._begun: list[RunningSave] = []  # one, once the writer knows of it
        self._metadata: Any = None  # the coordinator's
        self._ballot: Ballot | None = None  # once all ranks have a plan

    def note_phase(self, phase: str) -> None:
        """Notes what this rank does from now on: the others name it if this rank is lost."""
        self._phase = phase
        self.exchange.note_phase(phase)

    def plan(self, check: Callable[[], None]) -> SavePlan:
        """Plans with all ranks, which raise an error of any of them.

        Args:
            check: called before anything else on this rank.

        Returns:
            This rank's final plan.
        """
        exchange = self.exchange
        planning = PlanRound(
            self.planner, self.writer, exchange.rank, exchange.world_size, exchange.group
        )

        same_directory = SameDirectory(exchange)

        def offer() -> tuple[SaveOffer, bytes]:
            check()
            # Not before: if the others do not learn of an error, they wait for this rank, and the
            # numbers of later operations are out of step.
            self._state_dict = with_state_dicts(self._state_dict)
            self._set_up()
            return planning.offer(), self._place().digest

        def answer(offers: list[SaveOffer]) -> list[SaveAnswer]:
            return planning.answer(self._begun[0].save_id, offers)

        def first_answer(brought: list[tuple[SaveOffer, bytes]]) -> list[SaveAnswer | _LookFirst]:
            answers: list[Any] = answer([offer for offer, _ in brought])
            probe = same_directory.probe_for(self._place(), [digest for _, digest in brought])
            return [_LookFirst(probe, each) for each in answers] if probe else answers

        self._phase = "planning"  # as the exchange says already
        with paused_gc_of_many(), same_directory:
            told = exchange.reduce_scatter("plan", offer, first_answer)
            if isinstance(told, _LookFirst):
                same_directory.check(self._place(), told.probe)
                told = told.answer
            if told.is_again:
                told = exchange.reduce_scatter("plan", planning.offer_again, answer)
            self._ballot = self._new_ballot()
            self._begun[0].check = self._ballot.check
            self.save_id = self._begun[0].save_id = told.save_id
            plan = planning.finish(told)
            self._metadata = planning.metadata
        self._state_dict = {}  # the planner has it for as long as it needs it
        return plan

    def _place(self) -> Place:
        save, options = self._begun[0], self.writer.options
        return Place(save.directory or Path(self.path), options.node_local, save.made)

    def _set_up(self) -> None:
        writer, planner, is_coordinator = self.writer, self.planner, self.exchange.is_coordinator
        writer.reset(self.path)
        meta, state = writer.storage_meta(), self._state_dict
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
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
        more: dict[str, Any] = {}  # as DCP asks: subclasses may have the signature of before
        if "kwargs" in inspect.signature(writer.set_up_storage_writer).parameters:
            more = {"rank": self.exchange.rank, "use_collectives": True}
        with driven() as self._begun:
            writer.set_up_storage_writer(is_coordinator, **more)

    def write_and_settle(self, take: Callable[[], tuple[SavePlan, Any]]) -> Committed:
        """Writes this rank's items, votes, and returns what the coordinator has committed.

        Args:
            take: gives the plan of `plan`, and a planner, or the like, that gives its items' data.
                Called once, so that nobody else need hold them until they are written.

        Raises:
            The first error of any rank, or OutcomeUnknownError.
        """
        ballot = self._ballot or self._new_ballot()
        try:
            self.note_phase("writing")
            future = self.writer.write_data(*take())
            future.wait()
            results = future.value()
        except Exception as error:  # noqa: BLE001  (settle raises it, or what failed before it)
            ballot.fail(error, "writing")
        else:
            ballot.vote(results)
        committed = ballot.settle(self._commit, self._was_committed)
        return committed or Committed(self.save_id, self.exchange.world_size, 0, 0)

    def _new_ballot(self) -> Ballot:
        return Ballot(self.exchange, self.exchange.deadline.anew())

    def _commit(self, results: list[list[WriteResult]]) -> Committed:
        self.note_phase("committing")
        self.writer.finish(self._metadata, results)
        sizes = [entry.nbytes for rank in results for entry in getattr(rank, "files", ())]
        return Committed(self.save_id, len(results), len(sizes), sum(sizes))

    def _was_committed(self) -> bool:
        return stored_save_id(self._begun[0].directory or self.path) == self.save_id

    def cancel(self) -> bool:
        """Stops the save on all ranks, from any thread; False once it is decided to commit it."""
        if self._ballot is None or not self._ballot.cancel():
            return False
        for save in self._begun:
            save.stop()
        return True

    def leave(self, deadline: Deadline) -> None:
        """Stops the save as this process ends: on all ranks, unless they can do without this one.

        Args:
            deadline: until when the other ranks are told.
        """
        for save in self._begun:
            save.stop()
        if self._ballot is not None:
            self._ballot.leave(deadline)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the save on this rank.

        Args:
            error: that ended it. The other ranks learn of it. This rank removes its files, unless
                the coordinator may yet publish them.
        """
        if error is not None:
            if self._ballot is not None:
                self._ballot.fail(error, self._phase)
            else:
                self.exchange.fail(error)
            may_be_published = self._ballot is not None and self._ballot.may_be_committed
            for save in self._begun:
                abandon_save(self.writer, save, removes_files=not may_be_published)
        self.exchange.close()

    def __enter__(self) -> SaveRun:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.end(error)
