"""States that lie on the fake's devices, and what they hold."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from fake_cuda.fake import FakeCuda
from support.states import mixed_state, random_bytes

from torch_dcpx import _C

_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex128, torch.bool)


#: Drivers with other ways to copy many pieces: (version, whether it takes the kernel).
DRIVERS = [(12000, False), (12080, False), (13000, False), (13000, True)]


def use_driver(fake: FakeCuda, version: int, has_kernel: bool) -> None:
    """Lets C++ load the driver anew, of another version; one without the kernel refuses it."""
    fake.set_driver_version(version)
    fake.refuse_fatbin(not has_kernel)
    _C.forget_device_driver()
    if has_kernel:
        _C.set_pack_image(b"// any PTX\0")  # the fake runs its own twin, in any build


def everywhere(fqn: str) -> int:
    """Returns the host (-1), device 0 or device 1 by a tensor's name."""
    return zlib.crc32(fqn.encode()) % 3 - 1


def device_0(_: str) -> int:
    return 0


def moved(fake: FakeCuda, state: Any, place: Callable[[str], int], fqn: str = "") -> Any:
    """Returns the state with a copy of each tensor on the device that `place` says by its name, its
    strides and where it lies in its storage included; -1: as it is, on the host.
    """
    if isinstance(state, torch.Tensor):
        device = place(fqn)
        if device < 0 or not state.numel():
            return state
        storage = torch.empty(0, dtype=torch.uint8).set_(state.untyped_storage())  # type: ignore[call-overload]
        whole = fake.device_tensor(storage, device).view(state.dtype)
        return whole.as_strided(state.shape, state.stride(), state.storage_offset())
    if isinstance(state, Mapping):
        return {key: moved(fake, value, place, f"{fqn}.{key}") for key, value in state.items()}
    if isinstance(state, list):
        return [moved(fake, value, place, f"{fqn}.{i}") for i, value in enumerate(state)]
    return state


def scattered(
    fake: FakeCuda, sizes: Sequence[int], dtype: torch.dtype, pick: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns device memory full of 0xA5 and a view of `sizes` somewhere in it, its dimensions in
    any order and with gaps.
    """
    order = list(range(len(sizes)))
    if pick.random() < 0.3:
        pick.shuffle(order)
    strides, step = [0] * len(sizes), 1
    for d in reversed(order):
        step += pick.choice([0, 0, 0, 1, 5])
        strides[d] = step
        step *= max(sizes[d], 1)
    before = pick.choice([0, 0, 3, 1000])
    memory = fake.empty((before + step + pick.choice([0, 2]),), dtype, pick.randrange(2))
    return memory, memory.as_strided(tuple(sizes), tuple(strides), before)


def on_host(fake: FakeCuda, state: Any) -> Any:
    """Returns the state with what its tensors hold now, wherever they lie."""
    if isinstance(state, torch.Tensor):
        return fake.read_back(state) if state.numel() and fake.ordinal_of(state) >= 0 else state
    if isinstance(state, Mapping):
        return {key: on_host(fake, value) for key, value in state.items()}
    if isinstance(state, list):
        return [on_host(fake, value) for value in state]
    return state


def tensors(count: int, nbytes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns tensors of random bytes."""
    g = torch.Generator().manual_seed(seed)
    return {f"t{i}": random_bytes((nbytes,), torch.uint8, g) for i in range(count)}


def odd_state(seed: int = 0) -> dict[str, Any]:
    """Returns tensors that take every way to and from a device: runs, rows, single elements, parts
    of a slot, many to a slot, several slots.
    """
    g = torch.Generator().manual_seed(seed)

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return random_bytes(shape, dtype, g)

    return {
        **mixed_state(seed),
        **{f"small{i}": of(1 + 37 * i % 700, dtype=_DTYPES[i % 5]) for i in range(40)},
        "columns": of(700, 600)[:, 100:333],
        "narrow": of(3000, 64)[:, 5:6],
        "shifted": of(300_000)[17:],
        "cube": of(20, 30, 50, dtype=torch.bfloat16)[3:17, ::2, 10:41],
        "steps": of(500_000, dtype=torch.uint8)[::3],
        "permuted": of(12, 34, 56).permute(2, 0, 1),
        "odd_rows": of(999, 1001, dtype=torch.uint8)[:, :-1],
        "repeated": of(1, 4096).expand(80, 4096),
    }
