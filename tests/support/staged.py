"""Snapshots of tensors that are there when the call returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_dcpx.staging.snapshot import stage_guarded


def stage_tensors(tensors: Sequence[torch.Tensor], **kwargs: Any) -> list[torch.Tensor]:
    """Returns host tensors that hold what `tensors` hold; arguments as of `stage_guarded`."""
    return stage_guarded(tensors, overlap=False, **kwargs)[0]
