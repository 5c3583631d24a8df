"""One rank of the training run. `torchrun` starts it; `train_resume.py` starts `torchrun`.

This is the part to copy: FSDP2 and AdamW, a checkpoint every few steps through `DcpxWriter`,
and a resume through `DcpxReader` on as many ranks as there are now.
"""

import argparse
import json
import os
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byte_gpt import CONFIGS, ByteGpt, GptConfig, batch_for, load_corpus
from killed_save import KilledMidSave
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from torch_dcpx import DcpxReader, DcpxWriter

SEED = 20240229


class Trainer:
    """The model, its optimizer and the few Python values that a run needs to go on."""

    def __init__(self, config: GptConfig) -> None:
        torch.manual_seed(SEED)
        random.seed(SEED)
        self.config = config
        self.model = ByteGpt(config)  # the same weights on every rank: the seed says so
        self.parameters = sum(p.numel() for p in self.model.parameters())
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        self.corpus = load_corpus()
        self.step = 0
        self.losses: list[float] = []

    def train_step(self) -> float:
        """Trains one step and returns its loss, the mean over all ranks."""
        self.step += 1
        inputs, targets = batch_for(
            self.corpus, self.config, self.step, dist.get_rank(), dist.get_world_size()
        )
        loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.losses.append(total.item() / dist.get_world_size())
        return self.losses[-1]

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a checkpoint holds: sharded tensors, plain tensors, Python values."""
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "progress": {
                "step": self.step,
                "losses": self.losses,
                "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
                "run": {
                    "name": "byte-gpt",
                    "seed": SEED,
                    "saved_by_ranks": dist.get_world_size(),
                    "config": asdict(self.config),
                },
            },
        }

    def save(self, writer: dcp.StorageWriter) -> None:
        """Saves a checkpoint. Every rank must call it."""
        dcp.save(self.state_dict(), storage_writer=writer)

    def resume(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint, whatever the number of ranks that saved it."""
        state = self.state_dict()  # dcp.load fills its tensors in place and replaces its values
        dcp.load(state, storage_reader=DcpxReader(checkpoint))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        progress = state["progress"]
        self.step = progress["step"]
        self.losses = progress["losses"]
        torch.set_rng_state(progress["rng"]["torch"])
        random.setstate(progress["rng"]["python"])


def parse_arguments() -> argparse.Namespace:
    """Returns the command line, parsed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", choices=CONFIGS, default="demo")
    parser.add_argument("--last-step", type=int, required=True)
    parser.add_argument("--losses", type=Path, required=True, help="losses, one JSON line a step")
    parser.add_argument("--checkpoints", type=Path, help="saves to CHECKPOINTS/step-N; else none")
    parser.add_argument("--save-every", type=int, default=8, help="steps")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    parser.add_argument("--kill-at", type=int, help="rank 1 dies in the middle of this step's save")
    parser.add_argument("--stock-twin", type=Path, help="the last state, saved by stock DCP too")
    return parser.parse_args()


def main() -> None:
    """Trains, saves and, where asked to, resumes first or dies in the middle of a save."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # one core a rank; and sums in the same order every time
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    trainer = Trainer(CONFIGS[arguments.config])
    if arguments.resume:
        trainer.resume(arguments.resume)
    if rank == 0:
        start = f"resumed at step {trainer.step}" if arguments.resume else "from scratch"
        print(
            f"  {dist.get_world_size()} ranks, {trainer.parameters:,} parameters, {start}",
            flush=True,
        )

    while trainer.step < arguments.last_step:
        began = time.perf_counter()
        loss = trainer.train_step()
        step = trainer.step
        if rank == 0:
            seconds = time.perf_counter() - began
            print(f"  step {step:3d}  loss {loss:.4f}  {seconds:.2f} s", flush=True)
            with arguments.losses.open("a") as losses:
                losses.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")

        if arguments.checkpoints and step % arguments.save_every == 0:
            directory = arguments.checkpoints / f"step-{step}"
            is_victim = rank == 1 and step == arguments.kill_at
            began = time.perf_counter()
            trainer.save(KilledMidSave(directory) if is_victim else DcpxWriter(directory))
            if rank == 0:
                seconds = time.perf_counter() - began
                print(f"  saved {directory.name} in {seconds:.2f} s", flush=True)

    if arguments.stock_twin:
        trainer.save(dcp.FileSystemWriter(arguments.stock_twin))
    # Leave together, and without Python's shutdown: a thread of gloo may still hold a collective's
    # tensors, and ends the process with "terminate called without an active exception".
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
