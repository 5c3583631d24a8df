"""`dcpx.load` checks the whole load before it reads, and fails on all ranks or on none.

1. Each rank: state dicts of `Stateful` objects, metadata, differences, its plan (`load_plan`).
2. Coordinator: one error of all ranks' differences, or the global plan. No byte was read so far.
   If no rank asks for what was saved beneath parts, these first make room (`growth`).
3. Each rank reads, and its parts check the values (`stateful`). All ranks wait for the last.
4. Each rank hands the values to `Stateful` objects and to the caller's dict.

Ranks agree through the process group's store (`ranks/exchange`), never by a collective: a group
with NCCL alone suffices, and at the deadline the error names a lost rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from torch_dcpx._answers import BOUND, StorageTimeout
from torch_dcpx._arguments import check_part, check_state
from torch_dcpx._text import counted, grouped, human_bytes
from torch_dcpx.checkpoint.load_arguments import options_of, reader_for
from torch_dcpx.checkpoint.load_checks import LoadRules
from torch_dcpx.checkpoint.load_plan import LoadAnswer, LoadOffer, RankLoad, agree
from torch_dcpx.checkpoint.stateful import LoadPart, is_stateful
from torch_dcpx.errors import MismatchError
from torch_dcpx.events import UNHEARD, Operation, begun
from torch_dcpx.keys.key_map import KeyMap, checked_map
from torch_dcpx.options import ReadOptions
from torch_dcpx.planners.load_planner import DcpxLoadPlanner
from torch_dcpx.ranks.call_id import CallId, last_component, path_name
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.reader.pretrained_reader import shown_path
from torch_dcpx.reader.reader import WAY_OUT, DcpxReader, share_timeline
from torch_dcpx.reports import LoadReport
from torch_dcpx.storage.paths import AnyPath, checked_location
from torch_dcpx.storage.reader_lock import being_read
from torch_dcpx.storage.visibility import until_of_one_save
from torch_dcpx.timelines import Timeline

logger = logging.getLogger("torch_dcpx")

_PLANNER_HOOKS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_tensor",
    "commit_tensor",
)


def load(
    state_dict: dict[str, Any],
    checkpoint_id: AnyPath | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    options: ReadOptions | None = None,
    strict: bool = True,
    allow_missing: Iterable[str] = (),
    cast: Literal["error", "allow"] = "error",
    key_map: KeyMap | None = None,
) -> LoadReport:
    """Loads a checkpoint into `state_dict`, in place, as `dcp.load` does, and returns a report.

    Every rank of the group calls it, with equal arguments but for the state. It compares the whole
    state with the checkpoint before it reads. Stored names that no state asks for are no error:
    `LoadReport.unexpected`. But a `Stateful` object gets all that was saved beneath it, a module
    its extra states: with new entries of dicts and lists, tensors on the CPU.

    Args:
        state_dict: tensors, shards, objects, nested dicts and lists of them, and `Stateful`
            objects (modules, optimizers), whose `load_state_dict` is called at the end.
        checkpoint_id: directory of the checkpoint. With a reader: resets it to this directory.
        storage_reader: a `DcpxReader` with options of its own. Default: one of `checkpoint_id`.
        planner: plans the load, as with `dcp.load`. Default `DcpxLoadPlanner()`. With
            `allow_partial_load` missing names are no error. With a `create_local_plan` of its own
            shapes and kinds are not compared.
        process_group: ranks that load together. Default None: all of them.
        no_dist: loads in this process alone, as without torch.distributed. Default False.
        options: see `ReadOptions`. Default: those of the reader, else `ReadOptions()`.
        strict: whether names that the checkpoint does not hold are an error. Default True. With
            False their values stay as they are (`LoadReport.missing`), and no `Stateful` object
            gets entries that its `state_dict()` lacks.
        allow_missing: globs (`fnmatch`, case matters) of names that may be missing even so, such
            as "head.*"; names as in the error, flattened by dots. Default ().
        cast: "error" (default): stored and wanted dtypes must be equal. "allow": values are
            converted as `Tensor.copy_` does, and reported.
        key_map: stored names and shapes to the state's (`KeyMap`), with a `DcpxLoadPlanner`. An
            error shows the stored name. Default None: names are equal, letter by letter;
            `KeyMap()` leaves wrappers out.

    Returns:
        The report of this rank's load.

    Raises:
        MismatchError: names are missing, shapes, dtypes or kinds (tensor or object) differ, or an
            entry that a `Stateful` object lacks cannot be made: shards, an unknown type of key.
            Every rank raises all differences before anything is read.
        PlanError: ranks made different calls; or `key_map` does not fit the checkpoint: a rule
            without a match, two entries under one name.
        OptionError: an argument that cannot work.
        UnsupportedError: a reader that is no DcpxReader; a `Stateful` object's tensor on `meta`.
        NotCommittedError, CorruptionError, StorageError, UnsafePickleError: as `DcpxReader`; of any
            rank, on all ranks. `touched` names the values that may hold new bytes.
        RankError, RankLostError, StoreLostError: another rank failed, or did not come within
            `ReadOptions.load_timeout_s`.
    """
    return load_by(
        (strict, allow_missing, cast),
        state_dict,
        checkpoint_id,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        options=options,
        key_map=key_map,
    )


def load_by(
    given: LoadRules | tuple[Any, Any, Any],
    state_dict: dict[str, Any],
    checkpoint_id: AnyPath | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    options: ReadOptions | None = None,
    key_map: KeyMap | None = None,
    operation: Operation | None = None,
    has_trace: bool = True,
    is_repeated: bool = True,
    bound: StorageTimeout | None = None,
) -> LoadReport:
    """As `load`, of checked rules or arguments of `LoadRules.of`. `operation` tells its end (None:
    one that begins now); `has_trace`: it leaves a file in DCPX_TRACE_DIR; `is_repeated`: it begins
    anew where another save comes between; `bound`: of the call that this load is a part of.
    """
    began = time.perf_counter()
    call = CallId("load", last_component(checkpoint_id) or path_name(storage_reader))
    operation = operation or begun("dcpx.load", checkpoint_id, storage_reader)
    known: list[LoadRules] = [given] if isinstance(given, LoadRules) else []

    def load_once() -> LoadReport:
        timeout_s = ReadOptions.load_timeout_s
        with exchange_for(process_group, no_dist, timeout_s, "load", call) as exchange:
            if bound is not None:
                BOUND.set(bound)  # until the exchange ends
            check_state("load", state_dict, checkpoint_id)
            check_part("planner", planner, LoadPlanner, _PLANNER_HOOKS)
            if checkpoint_id is not None:
                exchange.place = checked_location(checkpoint_id, WAY_OUT, "checkpoint_id")
            if not known:  # an iterator gives globs once
                known.append(LoadRules.of(*given))
            rules, own_options = known[0], options_of(options, storage_reader)
            exchange.restart(own_options.load_timeout_s)
            exchange.agree_on(
                strict=rules.is_strict,
                cast="allow" if rules.is_cast_allowed else "error",
                node_local=own_options.node_local,
            )
            if own_options.node_local:
                exchange.leave_out_target()

            def prepared() -> RankLoad:
                reader = reader_for(storage_reader, checkpoint_id, options)
                own_planner = DcpxLoadPlanner() if planner is None else planner
                return RankLoad(reader, own_planner, rules, checked_map(key_map))

            run = LoadRun(exchange, state_dict, began, has_trace)
            with being_read(checkpoint_id or getattr(storage_reader, "path", None)):
                error = run.run(prepared)
        return run.ended(error)

    with operation:
        report = until_of_one_save(load_once) if is_repeated else load_once()
    operation.loaded(report, report.read)
    return report


def load_for_another_call(state_dict: dict[str, Any], reader: DcpxReader) -> None:
    """Loads in this process alone, as a part of another call: no event, no trace."""
    rules = True, (), "error"
    load_by(
        rules,
        state_dict,
        storage_reader=reader,
        no_dist=True,
        operation=UNHEARD,
        has_trace=False,
        bound=BOUND.get(),
    )


class LoadRun:
    """One rank's part in one load."""

    own: RankLoad  # once `plan` has made it

    def __init__(
        self, exchange: Exchange, target: dict[str, Any], began: float, has_trace: bool = True
    ) -> None:
        """Loads into `target` with the ranks of an exchange; `began` is a `perf_counter()`."""
        self._began = began
        self._exchange = exchange
        self._target = target
        self._answer = LoadAnswer(None)
        self._items = 0
        self._seconds = {"plan": 0.0, "read": 0.0, "apply": 0.0}
        self._timeline = Timeline("load", rank=exchange.rank, is_of_call=True, has_file=has_trace)
        self._timeline.operation_id = exchange.seal.hex()

    def run(self, make_own: Callable[[], RankLoad]) -> MismatchError | None:
        """Plans, reads and applies. Returns the error of all ranks, if the state does not fit."""
        try:
            error = self.plan(make_own)
            if error is None:
                self.read()
                self.apply()
            return error
        except BaseException as error:
            self.release(error)
            raise

    def ended(self, error: MismatchError | None) -> LoadReport:
        """Returns the report, and logs the names that were left out; or raises the error of `run`.

        REQUIRES: the exchange is closed, else it would send the error to the other ranks again.
        """
        if error is not None:
            self.release(error)
            raise error
        total_s = time.perf_counter() - self._began
        reader, differences = self.own.reader, self.own.differences
        read = reader.last_report
        parts = [part for part in self._target.values() if isinstance(part, LoadPart)]
        filled = {name for name in differences.missing if any(part.fills(name) for part in parts)}
        missing = tuple(name for name in differences.missing if name not in filled)
        others = [name for name in differences.missing if name in filled]
        nbytes = read.needed_bytes if read is not None else 0
        for names, one, more in (
            (missing, "stays as it was", "stay as they were"),
            (others, "follows another name", "follow other names"),
        ):
            if names:
                loaded = f"{counted(differences.found, 'name')}, {human_bytes(nbytes)},"
                text = "loaded %s from '%s'; it does not hold %s, which %s: %s"
                count, what = counted(len(names), "name"), one if len(names) == 1 else more
                logger.warning(text, loaded, shown_path(reader), count, what, grouped(names))
        self._timeline.end()
        return LoadReport(
            path=str(reader.path),
            items=self._items,
            nbytes=nbytes,
            missing=missing,
            unexpected=self.own.unexpected(self._answer.unasked),
            casts=differences.dtypes,
            plan_s=self._seconds["plan"],
            read_s=self._seconds["read"],
            apply_s=self._seconds["apply"],
            wait_s=total_s - sum(self._seconds.values()),
            total_s=total_s,
            read=read,
            timeline=self._timeline,
        )

    def plan(self, make_own: Callable[[], RankLoad]) -> MismatchError | None:
        """Agrees on the plan. Returns the error of all ranks, if any."""
        exchange = self._exchange

        @self._timing("plan")
        def prepare() -> LoadOffer:
            # Here, so that the other ranks learn of an error in this rank's arguments.
            self.own = make_own()
            share_timeline(self.own.reader, self._timeline)
            return self.own.prepare(self._target, exchange.rank, exchange.is_coordinator)

        @self._timing("plan")
        def prepare_again() -> LoadOffer:
            return self.own.prepare_again(self._answer.unasked)

        @self._timing("plan")
        def reduce(offers: list[LoadOffer]) -> list[LoadAnswer]:
            return agree(self.own, offers)

        with self._timeline.phase("exchange"):
            self._answer = exchange.reduce_scatter("plan", prepare, reduce)
            if self._answer.is_again:
                self._answer = exchange.reduce_scatter("plan", prepare_again, reduce)
        self._timeline.operation_id = exchange.seal.hex()
        return self._answer.error

    def read(self) -> None:
        """Reads. Returns when all ranks have read."""
        own = self.own

        def read_own() -> None:
            agreed = own.plan if self._answer.plan is None else self._answer.plan
            plan = own.planner.finish_plan(agreed)
            self._items = len(plan.items)
            own.reader.read_data(plan, own.planner).wait()
            for key, value in own.loaded().items():
                part = self._target.get(key)
                if isinstance(part, LoadPart):
                    part.check(value)

        self._exchange.note_phase("reading")
        self._on_all("read", read_own)
        own.growth.keep()

    def apply(self) -> None:
        """Hands the values to `Stateful` objects and to the caller's dict."""
        if self._answer.has_stateful:
            self._exchange.note_phase("applying")
            for part in self._apply_parts():
                self._on_all("apply", part)
        else:
            with self._timing("apply"):
                self._apply_own()

    def _apply_parts(self) -> Sequence[Callable[[], None]]:
        """Returns the steps, in order; each ends on all ranks or on none."""
        return (self._apply_own,)

    def _apply_own(self) -> None:
        loaded, target = self.own.loaded(), self._target
        for key in sorted(loaded, key=lambda key: _is_last(target.get(key))):
            value, current = loaded[key], target.get(key)
            if is_stateful(current):
                current.load_state_dict(value)
            else:
                target[key] = value

    def release(self, error: BaseException) -> None:
        """Ends a load that failed: closes the files that were opened for a read."""
        self._timeline.fail(error)
        self._timeline.end()
        if hasattr(self, "own"):
            self.own.growth.undo()
            DcpxReader.reset(self.own.reader)  # a subclass's may do more than that

    def _on_all(self, step: str, local: Callable[[], None]) -> None:
        """Makes this rank's step, and waits for those of all other ranks."""

        def part() -> None:
            try:
                with self._timing(step):
                    local()
            finally:  # the wait for the others has its full time, however long this part took
                self._exchange.restart()

        with self._timeline.phase("exchange"):
            self._exchange.all_reduce(step, part, lambda _: None)

    @contextmanager
    def _timing(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with self._timeline.phase(phase):
                yield
        finally:
            self._seconds[phase] += time.perf_counter() - began


def _is_last(value: Any) -> bool:
    return isinstance(value, LoadPart) and value.is_last
