"""What the tests on a real GPU share."""

from __future__ import annotations

import pytest
import torch

State = dict[str, torch.Tensor]


@pytest.fixture(scope="session", autouse=True)
def _warm_processes() -> None:
    """Takes the place of conftest's: each of these tests runs in a process of its own, and none
    forks from one that is warm.
    """


def state_on(device: torch.device | str, seed: int = 0) -> State:
    """Returns tensors of many layouts and dtypes, the same values on every device."""
    random = torch.Generator().manual_seed(seed)
    base = torch.randn(700, 500, generator=random)
    flat = torch.randn(100_000, generator=random)
    host = {
        "large": torch.randn(3 << 20, generator=random),
        "half": torch.randn(1000, generator=random).to(torch.float16),
        "bfloat16": torch.randn(33, 77, generator=random).to(torch.bfloat16),
        "float8": torch.randn(1001, generator=random).to(torch.float8_e4m3fn),
        "bool": torch.rand(999, generator=random) < 0.5,
        "complex": torch.randn(50, 50, generator=random, dtype=torch.complex64),
        "int64": torch.randint(-(1 << 60), 1 << 60, (17, 19), generator=random),
        "scalar": torch.tensor(4.5),
        "empty": torch.empty(0, 3),
    }
    state = {name: tensor.to(device) for name, tensor in host.items()}
    on_device, views = base.to(device), flat.to(device)
    state["transposed"] = on_device.t()
    state["rows"] = on_device[10:600:3]
    state["columns"] = on_device[:, 100:300]
    state["corner"] = on_device[5:50:2, 7:400:3]
    state["expanded"] = on_device[:1, :40].expand(30, 40)
    state["conjugate"] = state["complex"].conj()
    for i in range(200):
        state[f"view{i}"] = views[i * 500 : i * 500 + 499]
    return state


def on_host(state: State) -> State:
    """Returns copies by torch."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def blank(state: State) -> State:
    """Returns tensors of the same kind, full of zeros, on the same devices."""
    return {name: torch.zeros_like(tensor).contiguous() for name, tensor in state.items()}


def assert_same(found: State, wanted: State) -> None:
    """Raises unless both hold the same bytes, element by element."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        _assert_bits(name, found[name], tensor)


def _assert_bits(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    raw, wanted_raw = (
        t.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8)
        for t in (found, wanted)
    )
    assert torch.equal(raw, wanted_raw), name


def ordinals() -> list[int]:
    """Returns all devices."""
    return list(range(torch.cuda.device_count()))


def busy(seconds: float) -> None:
    """Keeps the current stream busy for about so long: what is queued next waits for it."""
    torch.cuda._sleep(int(seconds * 1.5e9))
