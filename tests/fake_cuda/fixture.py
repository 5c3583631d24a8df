"""The `fake_cuda` fixture: the fake driver, set up anew for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake_cuda.driver_calls import DriverCalls
    from fake_cuda.fake import FakeCuda


@pytest.fixture(scope="session")
def _fake_cuda_of_session() -> FakeCuda:
    from fake_cuda import fake

    return fake.FakeCuda(fake.build())


@pytest.fixture
def fake_cuda(
    _fake_cuda_of_session: FakeCuda, seed: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCuda]:
    """The fake CUDA driver, with the test's seed, as the driver that csrc/device loads.

    A test that leaves a report fails: of memory used after it was freed, of copies outside of
    allocations, of wrong contexts. `take_reports` takes those that are wanted.
    """
    import torch

    fake = _fake_cuda_of_session
    plain_repr = torch.Tensor.__repr__

    def safe_repr(tensor: torch.Tensor, **kwargs: Any) -> str:
        is_device = type(tensor) is torch.Tensor and fake.ordinal_of(tensor) >= 0
        return (
            f"<{tuple(tensor.size())} on the fake>" if is_device else plain_repr(tensor, **kwargs)
        )

    # An assertion that fails shows its tensors: those that the CPU cannot read as well.
    monkeypatch.setattr(torch.Tensor, "__repr__", safe_repr)
    monkeypatch.setenv("DCPX_CUDA_DRIVER", str(fake.path))
    fake.reset(seed)
    yield fake
    fake.sync()
    reports = fake.reports()
    fake.reset()
    assert reports == []


@pytest.fixture
def driver(fake_cuda: FakeCuda) -> Iterator[DriverCalls]:
    """The fake's entry points, with the context of device 0 current."""
    from fake_cuda.driver_calls import DriverCalls

    with DriverCalls(fake_cuda) as calls:
        yield calls


@pytest.fixture
def fake_device_memory(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Lets torch_dcpx take the fake's tensors for CUDA tensors; returns the fake driver.

    C++ loads the driver anew, and its kernel, which every build has here: the fake runs the twin.
    """
    from fake_cuda import seam

    from torch_dcpx import _C

    for name, answer in seam.answers(fake_cuda).items():
        monkeypatch.setattr(f"torch_dcpx.tensors.device.{name}", answer)
    seam.load_driver()
    yield fake_cuda
    fake_cuda.clear_failures()
    _C.forget_device_driver()
