"""What a whole save did: `save` returns it, and so does a handle's `result`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_dcpx.reports import WriteReport


@dataclass(frozen=True)
class SaveReport:
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
