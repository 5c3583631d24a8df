"""Ray Train with checkpoints of ours: sharded, in the background, resumed after a lost worker.

    python examples/frameworks/train_ray.py run --steps 20

Needs ray[train]. Ray is told where a checkpoint lies (NO_UPLOAD) and neither copies nor removes it:
the storage is one that all workers see, a file system or a store's URL, and retention is ours.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import torch_dcpx as dcpx


def train(config: dict[str, Any]) -> None:
    """What each worker does; a worker that is lost has all of them begin again here."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))
    model.to(ray.train.torch.get_device())
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    root = config["root"]
    with dcpx.CheckpointManager(root, keep_last=2) as manager:
        # Not ray.train.get_checkpoint(): the newest whole one may be newer than the last report.
        start = manager.resume(model=model, optimizer=optimizer).step or 0
        for step in range(start + 1, config["steps"] + 1):
            batch = torch.rand(8, 16, generator=torch.Generator().manual_seed(step))
            loss = model(batch.to(ray.train.torch.get_device())).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(config["step_s"])
            if step % config["save_every"] and step != config["steps"]:
                ray.train.report({"step": step, "loss": loss.item(), "start": start})
                continue
            handle = manager.save(step, model=model, optimizer=optimizer)
            handle.result()  # a checkpoint that Ray knows of is durable
            ray.train.report(
                {"step": step, "loss": loss.item(), "start": start},
                checkpoint=ray.train.Checkpoint(f"{root}/step-{step}"),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0, help="sleeps so long in each step")
    args = parser.parse_args()
    run = args.run.absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "root": str(run / "ckpt"), "steps": args.steps, "save_every": args.save_every,
            "step_s": args.step_s,
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            # Its own folder, as Ray takes checkpoints from there alone: STORAGE_PATH/NAME.
            name=run.name,
            storage_path=str(run.parent),
            failure_config=FailureConfig(max_failures=3),
        ),
    )  # fmt: skip
    result = trainer.fit()
    print(json.dumps({**result.metrics, "checkpoint": result.checkpoint.path}))


if __name__ == "__main__":
    main()
