"""What tests of device memory share."""

from __future__ import annotations

import torch
from fake_cuda.fake import FakeCuda
from support.states import assert_same


def device_copy(
    fake: FakeCuda, state: dict[str, torch.Tensor], ordinal: int = 0
) -> dict[str, torch.Tensor]:
    """Returns the state in the fake's device memory."""
    return {name: fake.device_tensor(tensor, ordinal) for name, tensor in state.items()}


def assert_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises unless both hold the same bytes, element by element."""
    assert_same(wanted, found)


def left(fake: FakeCuda) -> dict[str, int]:
    """Returns what the package holds of the driver's, but for its kernels' modules.

    A test that lets the driver refuse to take something back leaves that for the tests after it.
    """
    return {kind: count for kind, count in fake.live().items() if kind != "modules"}


def has_grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Returns of what there is more than there was."""
    return [kind for kind, count in after.items() if count > before[kind]]
