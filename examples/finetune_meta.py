"""Fine-tuning from pretrained weights without any rank holding the model.

    torchrun --nproc-per-node 2 examples/finetune_meta.py [DIR]  # DIR: build

1. Somebody has published safetensors, with other names and with q, k and v in one tensor.
2. The model is made on `meta`, sharded by FSDP2, and filled: each rank reads its own shards.
3. It trains one step, and all ranks export the result together.
4. The real safetensors package opens it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_dcpx as dcpx

WIDTH = 64


class Block(nn.Module):
    """Attention with one head, and q, k, v of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# From the published names to ours. `print(NAMES.dry_run(path))` shows what becomes of what.
NAMES = dcpx.KeyMap(
    (r"^transformer\.", ""),
    dcpx.Split(r"h\.(\d+)\.qkv", [rf"blocks.\1.{part}.weight" for part in "qkv"]),
    {"lm_head": "head.weight"},
)


def publish(path: Path) -> None:
    """Writes the weights that others have trained."""
    torch.manual_seed(0)
    state = {f"transformer.h.{i}.qkv": torch.randn(3 * WIDTH, WIDTH) / 8 for i in range(3)}
    state["transformer.lm_head"] = torch.randn(WIDTH, WIDTH) / 8
    safetensors.torch.save_file(state, path / "model.safetensors")


def sharded_net(ranks: int) -> Net:
    """Returns a model of which each rank will hold its shards; it takes no memory yet."""
    with torch.device("meta"):
        model = Net()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pretrained, tuned = path / "pretrained", path / "tuned"
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        pretrained.mkdir(parents=True)
        publish(pretrained)
        print(NAMES.dry_run(pretrained))
    dist.barrier()

    model = sharded_net(ranks)
    report = dcpx.load_pretrained(model, pretrained, key_map=NAMES)
    whole = sum(tensor.numel() * 4 for tensor in model.state_dict().values())
    print(f"rank {rank} read {report.nbytes} B of {whole}")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    model(torch.randn(2, 8, WIDTH)).square().mean().backward()
    optimizer.step()

    dcpx.export(model, tuned)
    if rank == 0:
        found = safetensors.torch.load_file(tuned / "model.safetensors")
        print(f"exported {len(found)} tensors, {sum(t.numel() * 4 for t in found.values())} B")
    dist.barrier()
    print(f"rank {rank} done", flush=True)
    sys.stdout.flush()
    os._exit(0)  # see README.md: a thread of gloo may outlive the interpreter


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build") / "finetune")
