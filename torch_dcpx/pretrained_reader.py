"""Names and sizes of what a path holds, without a byte of the tensors."""

from __future__ import annotations

import os

from torch_dcpx.mapped_state import sizes_of
from torch_dcpx.reader import DcpxReader

__all__ = ["stored_sizes"]


def stored_sizes(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...] | None]:
    """Returns sizes of the tensors in a checkpoint by name, None for objects."""
    return sizes_of(DcpxReader(path).read_metadata().state_dict_metadata)
