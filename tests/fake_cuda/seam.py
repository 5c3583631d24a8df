"""The fake in the place of torch.cuda: what torch_dcpx.tensors.device asks, answered by the fake.

The fixture `fake_device_memory` does this for a test; `install` does it in a fresh process:

    from fake_cuda import seam
    fake = seam.install()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fake_cuda.fake import IMAGE, FakeCuda, build


def answers(fake: FakeCuda) -> dict[str, Callable[..., Any]]:
    """Returns the functions of `torch_dcpx.tensors.device` that ask torch, for the fake's tensors.

    The current stream of a device is `fake.current_streams[device]`, 0 where it has none.
    """

    def ordinal_of(tensor: torch.Tensor) -> int:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu
        return fake.ordinal_of(tensor) if is_plain else -1

    def is_host(tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and ordinal_of(tensor) < 0

    def empty(sizes: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        return fake.empty(sizes, dtype, ordinal_of(like))

    def current_stream(ordinal: int) -> int:
        return fake.current_streams.get(ordinal, 0)

    return {
        "ordinal_of": ordinal_of,
        "is_host": is_host,
        "empty": empty,
        "current_stream": current_stream,
    }


def load_driver() -> None:
    """Lets C++ load the driver and the kernel anew, of the version and settings as they are now."""
    from torch_dcpx import _C

    _C.forget_device_driver()
    _C.set_pack_image(IMAGE)


def install(seed: int = 0) -> FakeCuda:
    """Puts the fake in the place of torch.cuda for the rest of the process, and returns it."""
    from torch_dcpx.tensors import device as device_memory

    fake = FakeCuda(build())
    os.environ["DCPX_CUDA_DRIVER"] = str(fake.path)
    fake.reset(seed)
    for name, answer in answers(fake).items():
        setattr(device_memory, name, answer)
    load_driver()
    return fake
