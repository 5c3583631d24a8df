"""One of two ranks of test_load_pretrained.py: an FSDP2 model on meta from safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch as st
import torch
import torch.distributed as dist
from support.worker import rank_case
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_dcpx as dcpx


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(33, 65), nn.LayerNorm(65), nn.Linear(65, 7))


def sharded_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = model_of()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_equals(model: nn.Module, source: nn.Module) -> None:
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), expected[name]), name


@rank_case()
def main(path: Path) -> None:
    rank = dist.get_rank()
    source = model_of()
    if rank == 0:
        st.save_file(source.state_dict(), path / "model.safetensors")
        st.save_file(
            {
                f"x.{n}": t.T.contiguous() if t.dim() == 2 else t
                for n, t in source.state_dict().items()
            },
            path / "turned.safetensors",
        )
    dist.barrier()
    model = sharded_on_meta()
    report = dcpx.load_pretrained(model, path / "model.safetensors")
    assert_equals(model, source)
    own = sum(t.to_local().numel() * 4 for t in model.state_dict().values())
    whole = sum(t.numel() * 4 for t in source.state_dict().values())
    assert report.nbytes == own < whole, (report.nbytes, own)  # byte ranges of its own shards
    turned = sharded_on_meta()
    rules = dcpx.KeyMap((r"^x\.", ""), dcpx.Transpose(r"\d\.weight"), wrappers=True)
    with pytest.raises(dcpx.PlanError, match=r"'x\.1\.weight' has 1 dimensions"):
        dcpx.load_pretrained(turned, path / "turned.safetensors", key_map=rules)
    assert all(p.is_meta for p in turned.parameters())
    rules = dcpx.KeyMap((r"^x\.", ""), dcpx.Transpose(r"[02]\.weight"))
    report = dcpx.load_pretrained(turned, path / "turned.safetensors", key_map=rules)
    assert report.nbytes == own
    assert_equals(turned, source)
    model(torch.randn(4, 33)).sum().backward()  # the memory is the model's own
    with pytest.raises(dcpx.StorageError, match=f"absent{rank}"):
        dcpx.load_pretrained(sharded_on_meta(), path / f"absent{rank}.safetensors")
