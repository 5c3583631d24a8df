"""What a save or load did on one rank: `writer.last_report` and `reader.last_report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_dcpx.layout import FileEntry

if TYPE_CHECKING:
    from torch_dcpx.read_files import ReadCounts
    from torch_dcpx.write_files import Written

__all__ = ["ReadReport", "WriteReport", "loaded_line", "saved_line"]


@dataclass(frozen=True)
class WriteReport:
    """What one save did on this rank.

    The five phases add up to `total_s`: the time inside this writer's `prepare_local_plan`,
    `write_data` and `finish`. What a rank waits for others is not in it, nor is DCP's own planning.

    Attributes:
        items: items written.
        files: files written.
        file_bytes: size of all files, framing and checksums included.
        payload_bytes: of these, the items' own data.
        direct_bytes: of the file bytes, written with O_DIRECT.
        buffered_bytes: of the file bytes, written through the page cache.
        in_place_bytes: of the file bytes, written from the tensors' own memory.
        slot_bytes: peak memory of the workers' slots.
        prepare_s: in Python: directory, lock and leftovers, the planner's `resolve_data`, copies of
            device tensors, the table, the results, and the fsync of the directory.
        copy_s, write_s: of the C++ engine's wall time without `fsync_s`, in the proportion of the
            time that all workers spent on filling slots and checksums, and on writing.
        fsync_s: of the engine's wall time: the sum over files divided by how many of them are
            synced at one time, which is the number of workers or of files, whichever is less.
        commit_s: checks, `.metadata`, its fsync and rename, removal of what was replaced. 0.0 on
            ranks that do not commit, and until `finish` has.
        total_s: all of these.
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

    @classmethod
    def of_write(cls, written: Written, workers: int, total_s: float) -> WriteReport:
        """Returns the report of a save that is written, and not committed.

        Args:
            written: with the counters of `WriteJob.report`: bytes; `copy_ns`, `write_ns` and
                `fsync_ns`, summed over the workers; `engine_ns` of wall time.
            workers: threads that wrote.
            total_s: time in the writer's hooks so far.
        """
        counters, files = written.counters, written.files
        engine_s = counters["engine_ns"] / 1e9
        fsync_s = min(engine_s, counters["fsync_ns"] / 1e9 / max(1, min(workers, len(files))))
        busy_ns = counters["copy_ns"] + counters["write_ns"]
        copy_s = (engine_s - fsync_s) * counters["copy_ns"] / max(1, busy_ns)
        return cls(
            len(written.results),
            len(files),
            sum(file.nbytes for file in files),
            written.payload_bytes,
            counters["direct_bytes"],
            counters["buffered_bytes"],
            counters["in_place_bytes"],
            counters["slot_bytes"],
            prepare_s=total_s - engine_s,
            copy_s=copy_s,
            write_s=engine_s - fsync_s - copy_s,
            fsync_s=fsync_s,
            commit_s=0.0,
            total_s=total_s,
        )

    def committed(self, total_s: float) -> WriteReport:
        """Returns the report of the same save with its commit, `total_s` being the time by now."""
        return replace(self, commit_s=total_s - self.total_s, total_s=total_s)

    @property
    def gb_per_s(self) -> float:
        """File bytes over `total_s`, in 10^9 bytes a second."""
        return self.file_bytes / self.total_s / 1e9 if self.total_s else 0.0

    def summary(self) -> str:
        """Returns it as a line for people."""
        return (
            f"{_decimal(self.file_bytes)} in {self.total_s:.3g} s ({self.gb_per_s:.3g} GB/s): "
            f"prepare {self.prepare_s:.3f}, copy {self.copy_s:.3f}, write {self.write_s:.3f}, "
            f"fsync {self.fsync_s:.3f}, commit {self.commit_s:.3f} s; "
            f"{_counted(self.items, 'item')}, {_counted(self.files, 'file')} on this rank"
        )


def saved_line(report: WriteReport, path: str, ranks: int, files: Sequence[FileEntry]) -> str:
    """Returns what the log says of a committed save.

    Args:
        report: of the rank that committed it.
        path: of the checkpoint.
        ranks: that wrote it; what they wrote together is said where there are several.
        files: of all of them.
    """
    file_bytes = sum(file.nbytes for file in files)
    all_ranks = f"{_decimal(file_bytes)} by {ranks} ranks; " if ranks > 1 else ""
    return f"saved '{path}': {all_ranks}{report.summary()}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _decimal(nbytes: int) -> str:
    """Returns bytes with a decimal unit, as the storage's makers count."""
    for exponent, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if nbytes >= 10**exponent:
            return f"{nbytes / 10**exponent:.2f} {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class ReadReport:
    """What one load did on this rank. Byte counts unless said otherwise.

    The six phases add up to `total_s`: the time inside this reader's `read_metadata`,
    `prepare_local_plan` and `read_data`. What a rank waits for others is not in it, nor is DCP's
    own planning.

    Attributes:
        items: read items of the plan.
        torch_items: of these, tensors loaded by torch's own loader, not by ours.
        needed_bytes: asked for.
        read_bytes: read from the files; more than needed by block edges and small gaps.
        verified_bytes: of these, checked against the files' checksums.
        in_place_bytes: of the needed ones, read straight to where they belong.
        through_slot_bytes: of the needed ones, the others: copied out of the workers' slots.
        foreign_bytes: of the read ones, from files of stock DCP, which hold no checksums.
        direct_bytes: of the read ones, read with O_DIRECT.
        slot_bytes: peak memory of the workers' slots.
        metadata_s: reading, checking and decoding `.metadata`.
        prepare_s: opening files and finding the items in them; finding the targets.
        read_s, verify_s, copy_s: of the C++ engine's wall time, in the proportion of the time that
            all workers spent on reading, on checksums, and on copies out of slots.
        finish_s: decoding of byte items, conversions, copies to devices, and the planner's hooks.
        total_s: all of these.
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

    @classmethod
    def of_read(
        cls,
        counts: ReadCounts,
        counters: Mapping[str, int],
        *,
        metadata_s: float,
        total_s: float,
    ) -> ReadReport:
        """Returns the report of a load that is done.

        Args:
            counts: what Python counted.
            counters: of `ReadJob.report`: bytes; `read_ns`, `verify_ns` and `copy_ns`, summed over
                the workers.
            metadata_s: in `read_metadata`.
            total_s: in all hooks of the reader.
        """
        needed, in_place = counters["needed_bytes"], counters["in_place_bytes"]
        read_s, verify_s, copy_s = _engine_phases(counts.engine_s, counters)
        return cls(
            counts.items,
            counts.torch_items,
            needed,
            counters["read_bytes"],
            counters["verified_bytes"],
            in_place,
            needed - in_place,
            counters["foreign_bytes"],
            counters["direct_bytes"],
            counters["slot_bytes"],
            metadata_s=metadata_s,
            prepare_s=total_s - metadata_s - counts.engine_s - counts.finish_s,
            read_s=read_s,
            verify_s=verify_s,
            copy_s=copy_s,
            finish_s=counts.finish_s,
            total_s=total_s,
        )

    @property
    def gb_per_s(self) -> float:
        """Needed bytes over `total_s`, in 10^9 bytes a second."""
        return self.needed_bytes / self.total_s / 1e9 if self.total_s else 0.0

    def summary(self) -> str:
        """Returns it as a line for people."""
        return (
            f"{_decimal(self.needed_bytes)} in {self.total_s:.3g} s ({self.gb_per_s:.3g} GB/s): "
            f"metadata {self.metadata_s:.3f}, prepare {self.prepare_s:.3f}, "
            f"read {self.read_s:.3f}, verify {self.verify_s:.3f}, copy {self.copy_s:.3f}, "
            f"finish {self.finish_s:.3f} s; "
            f"{_counted(self.items, 'item')}, {_decimal(self.read_bytes)} read on this rank"
        )


def _engine_phases(engine_s: float, counters: Mapping[str, int]) -> tuple[float, float, float]:
    """Returns (read, verify, copy): the wall time in proportion of what the workers did."""
    read_ns, verify_ns, copy_ns = (counters[name] for name in ("read_ns", "verify_ns", "copy_ns"))
    busy_ns = max(1, read_ns + verify_ns + copy_ns)
    verify_s, copy_s = engine_s * verify_ns / busy_ns, engine_s * copy_ns / busy_ns
    return engine_s - verify_s - copy_s, verify_s, copy_s


def loaded_line(report: ReadReport, path: str) -> str:
    """Returns what the log says of a load from `path`."""
    return f"loaded '{path}': {report.summary()}"
