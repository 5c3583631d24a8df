"""FSDP2 on two ranks saves; three ranks resume, then one. The same values on each.

    python examples/fsdp2_resume.py

Starts its own ranks, job after job; a job of yours is started by torchrun and calls `save` and
`resume` as these do.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import torch_dcpx as dcpx


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 5))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, step: int) -> None:
        batch = torch.rand(8, 16, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Returns a digest of all bits of model and optimizer, whoever holds the shards."""
        found = hashlib.sha256()
        states = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        for name, weight in sorted(self.model.state_dict().items()):
            for tensor in (weight, states[name]["exp_avg"], states[name]["exp_avg_sq"]):
                found.update(bytes(tensor.full_tensor().view(torch.uint8).flatten().tolist()))
        return found.hexdigest()[:16]


def save(root: str) -> Training:
    training = Training(seed=0)
    with dcpx.CheckpointManager(root, keep_last=2) as manager:
        for step in (1, 2, 3):
            training.train(step)
            manager.save(step, model=training.model, optimizer=training.optimizer)
    return training


def resume(root: str) -> Training:
    training = Training(seed=1)
    with dcpx.CheckpointManager(root) as manager:
        start = manager.resume(model=training.model, optimizer=training.optimizer)
        tags = manager.tags()  # every rank makes every call
        if dist.get_rank() == 0:
            print(f"resumed {start.tag} of {tags}")
    return training


def work(rank: int, ranks: int, what: str, root: str, port: int, digests: Any) -> None:
    """One rank of a job."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    training = save(root) if what == "save" else resume(root)
    digest = training.digest()
    if rank == 0:
        print(f"{what} on {ranks} ranks: {digest}", flush=True)
        digests.put(digest)
    dist.barrier()
    os._exit(0)  # see README.md: a thread of gloo may outlive the interpreter


def launch(ranks: int, what: str, root: str) -> str:
    """Runs a job on new processes. Returns the digest of rank 0."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    digests = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (ranks, what, root, store.port, digests), nprocs=ranks)
    return digests.get()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = [launch(2, "save", folder)] + [launch(n, "resume", folder) for n in (3, 1)]
    print(f"the same bits on 2, 3 and 1 ranks: {len(set(found)) == 1}")
