"""DcpxStager: the snapshot of torch-dcpx for stock `dcp.async_save`, in both of its modes."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager

from torch_dcpx.arena import process_pool
from torch_dcpx.staged_state import StagedState, StateWalk, stage_state
from torch_dcpx.staging import StagePlan, staging_workers

__all__ = ["DcpxStager"]


class DcpxStager(AsyncStager):
    """Copies a state to host memory for `dcp.async_save(..., async_stager=DcpxStager())`.

    The memory belongs to the process and is used again, by any stager, once a save has let go of
    what was staged: it is never overwritten before. In process mode the saving process maps it by
    one descriptor. Thread-safe; picklable.
    """

    _synchronize_after_execute = False  # stage() returns when all is copied

    def __init__(
        self,
        *,
        is_shared: bool = True,
        host_memory_bytes: int | None = None,
        workers: int | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Takes no memory yet.

        Args:
            is_shared: stage where another process can map it, as `AsyncCheckpointerType.PROCESS`
                needs. Default True.
            host_memory_bytes: bound on the staging memory of this process, in bytes; a larger state
                is refused. None (default): the memory that is available.
            workers: threads that copy. None (default): this rank's share of the cores, 2 to 8.
            timeout_s: seconds to wait for memory that a save still uses. Default 1800.
        """
        self.is_shared = is_shared
        self.host_memory_bytes = host_memory_bytes
        self.workers = workers
        self.timeout_s = timeout_s

    def stage(self, state_dict: dict[str, Any]) -> StagedState:
        """Returns the state as it is now; later changes do not show.

        Tensors become plain host tensors that require no gradient, in a DTensor or ShardedTensor
        where they were; all else is deep-copied.

        Raises:
            StagingError: no memory within the budget, the machine or the time; a forked child.
            UnsupportedError: a tensor has no memory, or it was freed or resized under it.
        """
        return stage_state(
            state_dict,
            process_pool(),
            is_shared=self.is_shared,
            budget_bytes=self.host_memory_bytes,
            workers=self.workers or staging_workers(),
            timeout_s=self.timeout_s,
        )

    def prewarm(self, state_dict: dict[str, Any]) -> None:
        """Takes the memory that staging `state_dict` needs from the system now, so that the first
        save does not pay for it. Copies nothing.

        Raises:
            StagingError: as `stage`.
        """
        walk = StateWalk(state_dict)
        process_pool().prewarm(
            StagePlan(walk.tensors, walk.name_of).nbytes,
            is_shared=self.is_shared,
            budget_bytes=self.host_memory_bytes,
            workers=self.workers or staging_workers(),
            timeout_s=self.timeout_s,
        )

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when all is copied."""

    def close(self) -> None:
        """Gives the process's staging memory back to the system; what a save still uses, when it
        ends. The stager stays usable."""
        process_pool().close()
