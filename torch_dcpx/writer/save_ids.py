"""Ties a data file to its save: its footer holds the id on which the ranks agreed.

The coordinator draws the id, and `.metadata` names it. `dcpx.save` sends it to every rank with its
answer; under `dcp.save` it travels in the `storage_data` of a rank's plan, which also names the
rank's files. Files of a rank that does not learn the id do not say which save they are of.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import Any

from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan

from torch_dcpx.errors import PlanError
from torch_dcpx.storage.names import FileEntry, id_bytes
from torch_dcpx.storage.running_save import RunningSave

_MAX_TAKEN = 1024

_taken: dict[tuple[str, str], None] = {}  # (prefix, save id) of plans written here, oldest first


@dataclasses.dataclass
class SavePrefix(_StoragePrefix):
    """Stock's prefix of a rank's files in its plan, with the id of their save."""

    save_id: str = ""


def with_save_id(plans: list[SavePlan], save: RunningSave | None) -> list[SavePlan]:
    """Returns the plans of all ranks with the save's id; as they are where a driver sends it."""
    if save is None or save.is_driven or not save.save_id or len(plans) < 2:
        return plans
    return [
        dataclasses.replace(plan, storage_data=SavePrefix(plan.storage_data.prefix, save.save_id))
        if type(plan.storage_data) in (_StoragePrefix, SavePrefix)
        else plan
        for plan in plans
    ]


def written_id(save: RunningSave | None, storage_data: Any) -> bytes:
    """Returns the id for the footers of this rank's files: of the save under way, or of the rank's
    final plan; b"" where the rank does not know it.
    """
    if save is not None and save.save_id:
        return id_bytes(save.save_id)
    if save is None or type(storage_data) is not SavePrefix or save.is_of_parent():
        return b""
    return id_bytes(storage_data.save_id) if _is_new(storage_data) else b""


def _is_new(prefix: SavePrefix) -> bool:
    """Returns whether this process has written nothing by this prefix yet: a planner that keeps
    finished plans (`enable_plan_caching`) gives that of an earlier save again.
    """
    key = prefix.prefix, prefix.save_id
    is_new = key not in _taken
    _taken.pop(key, None)  # without a lock, which a fork may find held: ranks have own keys
    _taken[key] = None
    for oldest in list(_taken)[:-_MAX_TAKEN]:
        _taken.pop(oldest, None)
    return is_new


def save_of(files: Iterable[FileEntry], save: RunningSave | None) -> str:
    """Returns the id of the save to commit. PlanError: a file was written for another save."""
    noted = [file for file in files if file.save_id]
    save_id = save.save_id if save is not None else ""
    if not save_id:  # hooks called by hand
        save_id = noted[0].save_id.hex() if noted else uuid.uuid4().hex
    for file in noted:
        if file.save_id != id_bytes(save_id):
            raise PlanError(
                f"'{file.path}' was written for save {file.save_id.hex()}, and the coordinator "
                f"commits save {save_id}: ranks mix two saves, nothing is published; every rank "
                "must make the same calls in the same order"
            )
    return save_id
