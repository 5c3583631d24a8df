"""What a save or load did on one rank: `writer.last_report` and `reader.last_report`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReadReport", "WriteReport"]


@dataclass(frozen=True)
class WriteReport:
    """What one `write_data` did on this rank.

    Attributes:
        items: items written.
        file_bytes: size of all files, in bytes.
        direct_bytes: of these, written with O_DIRECT.
        buffered_bytes: of these, written through the page cache.
        in_place_bytes: of these, written from the tensors' own memory.
        slot_bytes: peak memory of the workers' slots, in bytes.
    """

    items: int
    file_bytes: int
    direct_bytes: int
    buffered_bytes: int
    in_place_bytes: int
    slot_bytes: int


@dataclass(frozen=True)
class ReadReport:
    """What one `read_data` did on this rank. Byte counts unless said otherwise.

    Attributes:
        items: read items of the plan.
        torch_items: of these, loaded by torch's own loader, not by ours.
        needed_bytes: asked for.
        read_bytes: read from the files; more than needed by block edges and small gaps.
        verified_bytes: of these, checked against the files' checksums.
        in_place_bytes: of the needed ones, read straight into their tensors.
        direct_bytes: of the read ones, read with O_DIRECT.
        slot_bytes: peak memory of the workers' slots.
    """

    items: int
    torch_items: int
    needed_bytes: int
    read_bytes: int
    verified_bytes: int
    in_place_bytes: int
    direct_bytes: int
    slot_bytes: int
