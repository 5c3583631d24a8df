"""A training that ends early when Slurm says so, and goes on in the next job.

    torchrun --standalone --nproc-per-node 2 examples/slurm/train.py run --steps 20

`train.sbatch` runs it. On CUDA where there is a device for each rank, else on CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import torch_dcpx as dcpx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--time-left", type=float, default=300.0, help="s from signal to SIGKILL")
    parser.add_argument("--step-s", type=float, default=0.0, help="sleeps so long in each step")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        device = torch.device("cuda")
    else:
        dist.init_process_group("gloo")
        device = torch.device("cpu")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)).to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    root = args.run / "ckpt"
    with dcpx.CheckpointManager(root, keep_last=2, save_every=args.save_every) as manager:
        watch = manager.save_on_signal(time_left_s=args.time_left)
        start = manager.resume(model=model, optimizer=optimizer)
        first = 0 if start.step is None else start.step
        if rank == 0:
            print(f"begins behind step {first}", flush=True)
        for step in range(first + 1, args.steps + 1):
            batch = torch.rand(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:  # its own share; a real training would average now and then
                print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            time.sleep(args.step_s)
            if manager.should_save(step) or step == args.steps:
                manager.save(step, model=model, optimizer=optimizer)
            if watch.requested(step):
                break
        else:
            manager.wait()
            if rank == 0:
                (args.run / "finished").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
