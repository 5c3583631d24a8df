"""Reports of saves and loads.

`WriteReport` and `ReadReport` are of one rank (`writer.last_report`, `reader.last_report`);
`SaveReport` is the result of a save's handle, `LoadReport` what `load` returns.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace

from torch_dcpx._arguments import check_bool
from torch_dcpx._keywords import telling
from torch_dcpx._text import human_bytes
from torch_dcpx._trace_files import write_trace
from torch_dcpx.timelines import Phase, Timeline

# Objects of DCP's classes that the hook (`torch_dcpx.install`) has made ours in this process.
REPLACED: Counter[str] = Counter()


def _replaced() -> Mapping[str, int]:
    return dict(REPLACED)


@telling
@dataclass(frozen=True)
class _Traced:
    """Holds the timeline of a save or load, for each kind of report."""

    # No field: neither `asdict` nor `replace` takes it along.
    timeline: InitVar[Timeline | None] = field(default=None, kw_only=True)

    def __post_init__(self, timeline: Timeline | None) -> None:
        """Keeps the timeline. Default None: an empty one."""
        object.__setattr__(self, "_timeline", timeline or Timeline())

    @property
    def _noted(self) -> Timeline:
        return vars(self)["_timeline"]  # type: ignore[no-any-return]

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of this rank so far, with their times since the epoch and their threads."""
        return self._noted.phases

    def trace(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes a Chrome trace of this rank, for ui.perfetto.dev: phases by thread, work by
        worker.

        Args:
            path: a file.
            overwrite: True replaces another trace. Default False: none is there.

        Raises:
            OptionError: `path` is a URL, begins with "~", or is there.
            StorageError: the file cannot be written.
        """
        check_bool("overwrite", overwrite)
        write_trace(self._noted.trace(), path, overwrite=overwrite)


@dataclass(frozen=True)
class WriteReport(_Traced):
    """The report of one save on this rank.

    The five phases add up to `total_s`: the time inside this writer's `prepare_local_plan`,
    `write_data` and `finish`, without waits for other ranks and without DCP's own planning.

    Attributes:
        items, files: how many were written.
        file_bytes: size of all files, framing and checksums included.
        payload_bytes: of these, the items' own data.
        direct_bytes, buffered_bytes: of the file bytes, written with O_DIRECT, or through the page
            cache.
        in_place_bytes: of the file bytes, written from the tensors' own memory.
        slot_bytes: peak memory of the workers' slots.
        prepare_s: in Python: directory, lock and leftovers, the planner's `resolve_data`, copies of
            device tensors, the table, the results, and the fsync of the directory.
        copy_s, write_s: of the C++ engine's wall time without `fsync_s`, in the proportion of the
            time that all workers spent on filling slots and checksums, and on writing.
        fsync_s: of the engine's wall time: the sum over files, divided by the number of workers or
            of files, whichever is less, as so many are synced at one time.
        commit_s: checks, `.metadata`, its fsync and rename, removal of replaced files. 0.0 on ranks
            that do not commit, and before `finish`.
        total_s: all of these.
        replaced: objects of DCP's classes that the hook has made ours in this process so far, by
            role: writer, reader, planners, stager. Empty without `torch_dcpx.install`.
    """

    items: int
    files: int
    file_bytes: int
    payload_bytes: int
    direct_bytes: int
    buffered_bytes: int
    in_place_bytes: int
    slot_bytes: int
    prepare_s: float
    copy_s: float
    write_s: float
    fsync_s: float
    commit_s: float
    total_s: float
    replaced: Mapping[str, int] = field(default_factory=_replaced, init=False)

    def committed(self, total_s: float) -> WriteReport:
        """Returns the report of the same save with its commit; `total_s` is the time by now."""
        commit_s = total_s - self.total_s
        return replace(self, commit_s=commit_s, total_s=total_s, timeline=self._noted)

    def to_send(self) -> WriteReport:
        """Returns it without its timeline: DCP sends it to every rank with the metadata."""
        return replace(self)

    @property
    def gb_per_s(self) -> float:
        """File bytes over `total_s`, in 10^9 bytes a second."""
        return self.file_bytes / self.total_s / 1e9 if self.total_s else 0.0

    def summary(self) -> str:
        """Returns it as a line for people."""
        phases = _phases(self, "prepare", "copy", "write", "fsync", "commit")
        counts = f"{_counted(self.items, 'part')}, {_counted(self.files, 'file')} on this rank"
        return f"{human_bytes(self.file_bytes)} in {phases}; {counts}"


def saved_line(report: WriteReport, path: str, ranks: int, file_bytes: int) -> str:
    """Returns the log's line of a save: the report, and the file bytes of all ranks if several."""
    all_ranks = f"{human_bytes(file_bytes)} by {ranks} ranks; " if ranks > 1 else ""
    return f"saved '{path}': {all_ranks}{report.summary()}"


def _phases(report: WriteReport | ReadReport, *phases: str) -> str:
    """Returns the total, the speed and the time of each phase."""
    each = ", ".join(f"{phase} {getattr(report, phase + '_s'):.3f}" for phase in phases)
    return f"{report.total_s:.3g} s ({report.gb_per_s:.3g} GB/s): {each} s"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns a time in its largest whole unit: "12 min", "1 day"."""
    for unit, unit_s in (("day", 86400), ("h", 3600), ("min", 60)):
        count = int(seconds // unit_s)
        if count:
            return _counted(count, unit) if unit == "day" else f"{count} {unit}"
    return f"{int(seconds)} s"


def saved_in_root_line(what: str, root: str, ranks: int, file_bytes: int, seconds: float) -> str:
    """Returns the log's line of a manager's save."""
    by = _counted(ranks, "rank")
    return f"saved {what} in '{root}': {human_bytes(file_bytes)} by {by} in {seconds:.3g} s"


def resumed_line(what: str, root: str, age_s: float | None, ranks: int | None, now: int) -> str:
    """Returns the log's line of a resume.

    Args:
        age_s: seconds since the save; None: unknown.
        ranks: that saved; None: unknown.
        now: ranks that resume.
    """
    saved = "" if age_s is None or age_s < 0 else f"{duration(age_s)} ago"
    by = "" if ranks is None else f"by {_counted(ranks, 'rank')}"
    how = " ".join(filter(None, ("saved", saved, by)))
    how = f", {how}" if saved or by else ""
    since = "" if now == ranks else f"; {_counted(now, 'rank')} now"
    return f"resumed {what} of '{root}'{how}{since}"


@dataclass(frozen=True)
class ReadReport(_Traced):
    """The report of one load on this rank. Byte counts unless said otherwise.

    The six phases add up to `total_s`: the time inside this reader's `read_metadata`,
    `prepare_local_plan` and `read_data`, without waits for other ranks and without DCP's planning.

    Attributes:
        items: read items of the plan.
        torch_items: of these, tensors loaded by torch's own loader, not by ours.
        needed_bytes: asked for.
        read_bytes: read from the files; more than needed by block edges and small gaps.
        verified_bytes: of these, checked against the files' checksums.
        in_place_bytes, through_slot_bytes: of the needed ones, read straight to where they belong,
            or copied out of the workers' slots.
        foreign_bytes: of the read ones, from files of stock DCP, which hold no checksums.
        direct_bytes: of the read ones, read with O_DIRECT.
        slot_bytes: peak memory of the workers' slots.
        metadata_s: reading, checking and decoding `.metadata`.
        prepare_s: opening files and finding the items in them; finding the targets.
        read_s, verify_s, copy_s: of the C++ engine's wall time, in the proportion of the time that
            all workers spent on reading, on checksums, and on copies out of slots.
        finish_s: decoding of byte items, conversions, copies to devices, and the planner's hooks.
        total_s: all of these.
        replaced: as in `WriteReport`.
    """

    items: int
    torch_items: int
    needed_bytes: int
    read_bytes: int
    verified_bytes: int
    in_place_bytes: int
    through_slot_bytes: int
    foreign_bytes: int
    direct_bytes: int
    slot_bytes: int
    metadata_s: float
    prepare_s: float
    read_s: float
    verify_s: float
    copy_s: float
    finish_s: float
    total_s: float
    replaced: Mapping[str, int] = field(default_factory=_replaced, init=False)

    @property
    def gb_per_s(self) -> float:
        """Needed bytes over `total_s`, in 10^9 bytes a second."""
        return self.needed_bytes / self.total_s / 1e9 if self.total_s else 0.0

    def summary(self) -> str:
        """Returns it as a line for people."""
        phases = _phases(self, "metadata", "prepare", "read", "verify", "copy", "finish")
        counts = f"{_counted(self.items, 'part')}, {human_bytes(self.read_bytes)} read on this rank"
        return f"{human_bytes(self.needed_bytes)} in {phases}; {counts}"


def loaded_line(report: ReadReport, path: str) -> str:
    """Returns the log's line of a load."""
    return f"loaded '{path}': {report.summary()}"


@dataclass(frozen=True)
class SaveReport(_Traced):
    """A checkpoint that is committed and durable on every rank.

    Attributes:
        checkpoint_id: its directory.
        save_id: names the save; `.metadata` holds it too.
        ranks: that wrote it.
        files: data files of all ranks. 0, and so are the bytes, where the coordinator was lost
            after it had committed, so that nobody could say.
        file_bytes: their size, framing and checksums included.
        blocked_s: seconds the caller waited: all of `save`; of `async_save` until it returned.
        total_s: seconds from the call until all ranks had the commit.
        write: what this rank did; None where a subclass's `write_data` leaves no report.
    """

    checkpoint_id: str
    save_id: str
    ranks: int
    files: int
    file_bytes: int
    blocked_s: float
    total_s: float
    write: WriteReport | None

    def summary(self) -> str:
        """Returns it as a line for people."""
        by = _counted(self.ranks, "rank")
        return f"{human_bytes(self.file_bytes)} by {by} in {self.total_s:.3g} s"


@dataclass(frozen=True)
class LoadReport(_Traced):
    """The report of one `dcpx.load` on this rank. The four phases add up to `total_s`.

    Attributes:
        path: directory of the checkpoint.
        items: read items of this rank's plan: tensors, their shards, and Python objects.
        nbytes: bytes of these that the state asked for.
        missing: names of the state that the checkpoint does not hold, left as they were: with
            `strict=False`, by `allow_missing`, or by a planner with `allow_partial_load`.
        unexpected: names of the checkpoint that no rank wanted; with metadata of each rank's own,
            those that this rank did not want.
        casts: (name, stored dtype, dtype of the state) of tensors converted as by `copy_`; dtypes
            by name, such as "float32". Empty for a planner that finds targets its own way.
        plan_s: `state_dict()` of `Stateful` objects, metadata, checks and this rank's plan.
        read_s: reading, up to the last byte of this rank.
        apply_s: `load_state_dict()` of `Stateful` objects.
        wait_s: the rest: other ranks.
        total_s: the whole call.
        read: the reader's own report; None for a subclass that reads its own way.
    """

    path: str
    items: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    casts: tuple[tuple[str, str, str], ...]
    plan_s: float
    read_s: float
    apply_s: float
    wait_s: float
    total_s: float
    read: ReadReport | None

    def without_own(self) -> LoadReport:
        """Returns the report of a manager's load: no item of its own is unexpected, but for a
        scheduler's, by the name of that part.
        """
        own = "dcpx."
        parts = {f"{own}lr_scheduler": "lr_scheduler"}
        names = (parts.get(name, name) for name in self.unexpected)
        left = tuple(name for name in names if not name.startswith(own))
        return replace(self, unexpected=left, timeline=self._noted)

    @property
    def is_whole(self) -> bool:
        """Whether the state got all it asked for, as it was stored."""
        return not (self.missing or self.casts)
