"""FSDP2 on two ranks saves; three ranks resume, then one. The same values on each.

    python examples/fsdp2_resume.py

Starts its own ranks, as `torchrun --nproc-per-node N examples/fsdp2_resume.py save|resume DIR`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import torch_dcpx as dcpx

TIMEOUT_S = 240.0  # for one job; then it is ended


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
                found.update(tensor.full_tensor().numpy().tobytes())
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


def work(what: str, root: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = save(root) if what == "save" else resume(root)
    digest = training.digest()
    if dist.get_rank() == 0:
        print(f"{what} on {dist.get_world_size()} ranks: {digest}", flush=True)
    dist.barrier()
    os._exit(0)  # see README.md: a thread of gloo may outlive the interpreter


def launch(ranks: int, what: str, root: str) -> str:
    """Runs a job. Returns the digest that it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "localhost", "--nproc-per-node", str(ranks), __file__, what, root]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    job = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
    )
    print(job.stdout, end="", flush=True)
    return job.stdout.split()[-1]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(*sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        digests = [launch(2, "save", folder)] + [launch(n, "resume", folder) for n in (3, 1)]
        print(f"the same bits on 2, 3 and 1 ranks: {len(set(digests)) == 1}")
