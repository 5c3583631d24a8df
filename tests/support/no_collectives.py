"""What runs here must do without torch.distributed's collectives, as a job on NCCL asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

COLLECTIVES = (
    "all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "new_group", "scatter",
    "scatter_object_list",
)  # fmt: skip


@contextmanager
def no_collectives() -> Iterator[None]:
    """Makes every collective of the default group raise, on any thread."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective")

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, refuse)
        yield
