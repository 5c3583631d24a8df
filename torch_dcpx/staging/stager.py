"""DcpxStager: the snapshot of torch-dcpx for stock `dcp.async_save`, in both of its modes."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager, StagingOptions

from torch_dcpx._arguments import check_bool, check_int, check_seconds, check_state
from torch_dcpx.errors import OptionError, StagingError, UnsupportedError, must_be
from torch_dcpx.staging.arena import process_pool
from torch_dcpx.staging.snapshot import StagePlan, staging_workers
from torch_dcpx.staging.staged_state import StagedState, StateWalk
from torch_dcpx.tensors.copy_guard import CopyGuard

# Fields of torch's StagingOptions.
_KNOWN = frozenset(
    ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy")
)


class DcpxStager(AsyncStager):
    """Copies a state to host memory for `dcp.async_save(..., async_stager=DcpxStager())`.

    The memory belongs to the process and is used again, by any stager, once a save has let go of
    what was staged: it is never overwritten before. In process mode the saving process maps it by
    one descriptor. Thread-safe; picklable.

    Attributes:
        guard: of the last `stage` with `overlap=True`: lets streams go on behind its copies.
    """

    _synchronize_after_execute = False  # stage() returns when all is copied, or a future says when

    def __init__(
        self,
        config: StagingOptions | None = None,
        *,
        is_shared: bool = True,
        host_memory_bytes: int | None = None,
        workers: int | None = None,
        timeout_s: float = 1800.0,
        overlap: bool = False,
    ) -> None:
        """Takes no memory yet.

        Args:
            config: as `DefaultStager` takes it. `use_shared_memory=False` is `is_shared=False`,
                `use_async_staging=True` is `overlap=True`: `stage` gives a future.
                `use_pinned_memory` and `use_non_blocking_copy` have no effect: what devices copy to
                is page-locked, and they never block one another. Default None: says nothing.
            is_shared: stage where another process can map it, as `AsyncCheckpointerType.PROCESS`
                needs. Default True.
            host_memory_bytes: bound on the staging memory of this process, in bytes; a larger state
                is refused. None (default): the memory that is available.
            workers: threads that copy. None (default): this rank's share of the cores, 2 to 8.
            timeout_s: seconds to wait for memory that a save still uses. Default 1800.
            overlap: `stage` returns once the copies from devices are queued there, and gives a
                future. What overwrites saved tensors must then come after `guard.wait()`;
                `guard_optimizer` does that for an optimizer's steps. Default False.

        Raises:
            OptionError: an argument that cannot work, or a field of `config` that is no bool.
            UnsupportedError: a field of a newer torch's is set.
        """
        check_bool("is_shared", is_shared)
        if host_memory_bytes is not None:
            check_int("host_memory_bytes", host_memory_bytes, 0, 1 << 60)
        check_int("workers", workers, 1, 256, or_none=True)
        check_seconds("timeout_s", timeout_s)
        check_bool("overlap", overlap)
        if config is not None:
            _check_config(config)
            is_shared = is_shared and config.use_shared_memory
            overlap = overlap or config.use_async_staging
        self.is_shared = is_shared
        self.host_memory_bytes = host_memory_bytes
        self.workers = workers
        self.timeout_s = timeout_s
        self.overlap = overlap
        self.guard = CopyGuard()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "guard": CopyGuard()}  # copies stay with the process they are of

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """Returns the state as it is now; later changes do not show.

        Tensors become plain host tensors that require no gradient, in a DTensor or ShardedTensor
        where they were; all else is deep-copied. With `overlap=True` a future of that state,
        which is done when the last copy is: `dcp.async_save` then returns its `AsyncSaveResponse`.

        Raises:
            StagingError: no memory within the budget, the machine or the time; a forked child; a
                device failed, or a current stream is capturing a graph. What fails after the call
                is the future's.
            UnsupportedError: a tensor has no memory, or it was freed or resized under it.
        """
        state, guard = self._staged(state_dict)
        if not self.overlap:
            return state
        self.guard = guard
        return _when_copied(state, guard)

    def _staged(self, state_dict: dict[str, Any]) -> tuple[StagedState, CopyGuard]:
        """Returns the state as it is now, on the host, and with `overlap` when it is there."""
        walk = StateWalk(state_dict)
        plan = StagePlan(walk.tensors, walk.name_of)
        with process_pool().lease(
            plan.nbytes,
            is_shared=self.is_shared,
            budget_bytes=self.host_memory_bytes,
            timeout_s=self.timeout_s,
        ) as arena:
            workers = self.workers or staging_workers()
            staged, guard = plan.copy_to(arena, workers, overlap=self.overlap)
            try:
                state = walk.rebuild(staged)
            except BaseException:
                with contextlib.suppress(StagingError):
                    guard.finish()  # the state may change from here on
                raise
            state.arena = arena
        return state, guard

    def prewarm(self, state_dict: dict[str, Any]) -> None:
        """Takes the memory that staging `state_dict` needs from the system now, so that the first
        save does not pay for it. Copies nothing.

        Raises:
            StagingError: as `stage`.
            OptionError: no state.
        """
        check_state("prewarm", state_dict)
        walk = StateWalk(state_dict)
        needs = StagePlan(walk.tensors, walk.name_of)
        process_pool().prewarm(
            needs.nbytes,
            is_shared=self.is_shared,
            budget_bytes=self.host_memory_bytes,
            workers=self.workers or staging_workers(),
            timeout_s=self.timeout_s,
            device=min(needs.devices, default=-1),
        )

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when all is copied, or a future."""

    def close(self) -> None:
        """Gives the process's staging memory back to the system, once no save uses it. Reusable."""
        process_pool().close()


def _check_config(config: Any) -> None:
    if not isinstance(config, StagingOptions):
        wanted = "a StagingOptions of torch.distributed.checkpoint.staging"
        way = "; options of DcpxStager are given by name, such as overlap=True"
        raise must_be("config", config, wanted, way)
    for name, value in vars(config).items():
        if name in _KNOWN and type(value) is not bool:
            raise OptionError(
                f"config: {name} must be True or False, not {value!r:.80}", option=name, value=value
            )
        default = getattr(type(config), name, None)
        if name not in _KNOWN and value != default:
            raise UnsupportedError(
                f"config: DcpxStager does not know what {name}={value!r:.80} asks for; leave it at "
                f"{default!r:.80}, or stage with torch's DefaultStager"
            )


def _when_copied(state: StagedState, guard: CopyGuard) -> Future[StagedState]:
    """Returns the future of a state whose copies go on."""
    staged: Future[StagedState] = Future()
    staged.set_running_or_notify_cancel()
    if guard.is_finished:
        staged.set_result(state)
        return staged

    def wait() -> None:
        try:
            guard.finish()
        except BaseException as error:  # noqa: BLE001  (raised by whoever asks the future)
            staged.set_exception(error)
        else:
            staged.set_result(state)

    try:
        # No daemon: the interpreter's end joins it, as it is in C++ for most of its time.
        threading.Thread(target=wait, name="dcpx-stage", daemon=False).start()
    except RuntimeError as error:
        guard.finish()
        raise StagingError(f"start the thread that waits for copies: {error}") from error
    return staged
