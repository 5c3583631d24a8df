"""Quantized and compressed tensors: they come back with the values that were saved, or no load
takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.saves import WRITERS, save
from torch import nn

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, DcpxReader, KeyMap, Merge, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]


def per_tensor(
    scale: float, value: float = 0.0, zero: int = 0, dtype: torch.dtype = torch.qint8
) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.full((2, 3), value), scale, zero, dtype)


def per_channel(scale: float, value: float = 0.0, zero: int = 0) -> torch.Tensor:
    scales, zeros = torch.tensor([scale, 2 * scale]), torch.tensor([zero, zero])
    return torch.quantize_per_channel(torch.full((2, 3), value), scales, zeros, 0, torch.qint8)


def quint8(scale: float, value: float = 0.0, zero: int = 0) -> torch.Tensor:
    return per_tensor(scale, value, zero, torch.quint8)


def compressed(_scale: float) -> torch.Tensor:
    return torch.eye(3).to_sparse_csr()


def is_same(found: Any, saved: torch.Tensor) -> bool:
    return torch.equal(found, saved) and torch.equal(found.dequantize(), saved.dequantize())


class Net(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("q", value)


class Holder:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


KINDS: list[Callable[..., torch.Tensor]] = [per_tensor, per_channel, quint8]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_quantized_tensor_comes_back_into_one_of_any_scale(
    tmp_path: Path, make: Callable[..., torch.Tensor], writer: str
) -> None:
    saved = make(0.1, 1.0)
    save({"w": saved}, tmp_path, writer)
    for scale, zero in ((0.1, 0), (0.5, 0), (0.1, 5)):
        state = {"w": make(scale, 0.0, zero)}
        dcpx.load(state, tmp_path, no_dist=True)
        assert is_same(state["w"], saved)
        state = {"w": make(scale, 0.0, zero)}
        dcp.load(state, storage_reader=DcpxReader(tmp_path), no_dist=True)
        assert is_same(state["w"], saved)


@pytest.mark.parametrize("make", KINDS)
def test_resume_takes_the_saved_scale(tmp_path: Path, make: Callable[..., torch.Tensor]) -> None:
    saved = make(0.1, 1.0)
    with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
        own: dict[str, Any] = {"t": saved, "list": [saved], "h": Holder({"a": saved})}
        manager.save(1, model=Net(saved), state=own)
        for fresh in ({"a": make(0.5)}, {}):  # a Stateful that began without it
            net = Net(make(0.5))
            own = {"t": make(0.5), "list": [make(0.5)], "h": Holder(dict(fresh))}
            manager.resume(model=net, state=own)
            found = [net.q, own["t"], own["list"][0], own["h"].state["a"]]
            assert [is_same(one, saved) for one in found] == [True] * 4


def test_load_pretrained_takes_the_saved_scale(tmp_path: Path) -> None:
    saved = Net(per_tensor(0.1, 1.0))
    dcpx.save({"model": saved.state_dict()}, tmp_path, no_dist=True)
    net = Net(per_tensor(0.5))
    dcpx.load_pretrained(net, tmp_path)
    assert is_same(net.q, saved.q) and torch.equal(net.linear.weight, saved.linear.weight)


def test_part_of_a_quantized_tensor_takes_values_of_its_own_scale_alone(tmp_path: Path) -> None:
    """Stock shows the other part, or the whole, under a scale that is not its own."""
    dcpx.save({"w": per_tensor(0.1, 1.0)}, tmp_path / "a", no_dist=True)
    whole = torch.quantize_per_tensor(torch.zeros(4, 3), 0.1, 0, torch.qint8)
    dcpx.load({"w": whole[1:3]}, tmp_path / "a", no_dist=True)
    assert whole.dequantize().sum() == 6.0
    whole = torch.quantize_per_tensor(torch.zeros(4, 3), 0.5, 0, torch.qint8)
    with pytest.raises(UnsupportedError, match=r"'w' is stored under another scale.*part or view"):
        dcpx.load({"w": whole[1:3]}, tmp_path / "a", no_dist=True)
    assert not whole.dequantize().any()
    dcpx.save({n: per_tensor(0.1, 1.0) for n in "xy"}, tmp_path / "b", no_dist=True)
    state = {"xy": whole}
    with pytest.raises(UnsupportedError, match="part or view"):
        dcpx.load(state, tmp_path / "b", key_map=KeyMap(Merge(["x", "y"], "xy")), no_dist=True)
    state = {"xy": torch.quantize_per_tensor(torch.zeros(4, 3), 0.1, 0, torch.qint8)}
    dcpx.load(state, tmp_path / "b", key_map=KeyMap(Merge(["x", "y"], "xy")), no_dist=True)
    assert state["xy"].dequantize().sum() == 12.0


OTHERS: list[tuple[Any, Any, str]] = [
    (per_tensor, per_channel, "'w' is stored as torch.qint8, torch.per_tensor_aff"),
    (per_channel, per_tensor, "'w' is stored as torch.qint8, torch.per_channel_aff"),
    (per_tensor, lambda _: torch.zeros(2, 3), "which torch does not copy to torch.float32"),
    (per_tensor, quint8, "which torch does not copy to torch.quint8"),
    (compressed, lambda _: torch.zeros(3, 3), "sparse_csr of 3 .*has torch.strided"),
    (
        compressed,
        lambda _: torch.ones(3, 3).to_sparse_csr(),
        "sparse_csr of 3 elements, and the state has torch.sparse_csr of 9 elements",
    ),
]


def test_target_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    for saved, target, text in OTHERS:
        dcpx.save({"w": saved(0.1)}, tmp_path, no_dist=True)
        with pytest.raises(UnsupportedError, match=text):
            dcpx.load({"w": target(0.1)}, tmp_path, cast="allow", no_dist=True)


def test_compressed_tensor_comes_back_into_one_of_as_many_elements(tmp_path: Path) -> None:
    saved = torch.eye(3).to_sparse_csr()
    with CheckpointManager(tmp_path, no_dist=True, async_save=False) as manager:
        manager.save(1, state={"w": saved})
        state = {"w": torch.eye(3).flip(0).mul(5).to_sparse_csr()}
        manager.resume(state=state)
    assert torch.equal(state["w"].to_dense(), torch.eye(3))
