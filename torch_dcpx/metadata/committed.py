"""Which save a directory's `.metadata` is of: asked when the coordinator does not answer."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torch_dcpx.errors import DcpxError
from torch_dcpx.metadata.file import decode_save_id
from torch_dcpx.storage.directory import Directory
from torch_dcpx.storage.names import METADATA_NAME

logger = logging.getLogger("torch_dcpx")


def stored_save_id(path: str | os.PathLike[str]) -> str | None:
    """Returns the id of the save that committed what lies in `path`.

    None where there is no metadata, or none that says: of stock DCP.

    Raises:
        DcpxError: it cannot be read.
    """
    with Directory(Path(path)) as directory:
        if not directory.is_regular(METADATA_NAME):
            return None
        with directory.open_small(METADATA_NAME) as file:
            return decode_save_id(file, str(directory.path / METADATA_NAME))


def committed_save_id(path: str | os.PathLike[str]) -> str | None:
    """Returns `stored_save_id`; None, too, where it cannot be read, which is logged."""
    try:
        return stored_save_id(path)
    except DcpxError as error:
        logger.warning("which save committed '%s' cannot be said: %s", path, str(error))
        return None
