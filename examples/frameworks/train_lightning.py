"""Trains with Lightning (Fabric or Trainer), saves sharded checkpoints, resumes from one.

    torchrun --nproc-per-node 2 examples/frameworks/train_lightning.py RUN
    torchrun --nproc-per-node 2 examples/frameworks/train_lightning.py RUN --resume RUN/step_2.ckpt

Knows nothing of torch-dcpx. The last line is JSON: the losses of each step on all ranks, exact, and
how many seconds each save and the load took.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_on_cpu import FabricFSDPOnCPU, FSDPOnCPU, use_fsdp_on_cpu
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BATCH = 4  # samples a rank and step
RANKS = int(os.environ["WORLD_SIZE"])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return x + torch.dropout(self.linear(self.norm(x)).relu(), 0.1, self.training)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where the checkpoints go: FOLDER/step_2.ckpt, ...")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--resume", help="the checkpoint to go on from, such as FOLDER/step_2.ckpt")
    parser.add_argument("--api", choices=("fabric", "trainer"), default="trainer")
    parser.add_argument("--strategy", choices=("fsdp", "model_parallel"), default="model_parallel")
    parser.add_argument("--strategy-class", help="in place of Lightning's: package.module:Class")
    parser.add_argument("--keep", type=int, default=-1, help="the newest only, so many")
    parser.add_argument("--save-last", action="store_true", help="a last.ckpt, too")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(args.width) for _ in range(args.layers)))


def strategy_class(args: argparse.Namespace, default: Any) -> Any:
    """Returns the class that the command line names."""
    if args.strategy_class is None:
        return default
    module, _, name = args.strategy_class.partition(":")
    return getattr(importlib.import_module(module), name)


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for module in (*model, model):
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


def loss_of(model: nn.Module, step: int, width: int) -> torch.Tensor:
    """Returns the loss of a step; its number draws the samples and what is dropped out."""
    torch.manual_seed(1000 * step + dist.get_rank())
    return (model(torch.randn(BATCH, width)) - 1).square().mean()


class Timed:
    """Seconds that saves have taken, and the load."""

    def __init__(self) -> None:
        self.save_s: list[float] = []
        self.load_s: list[float] = []

    def __call__(self, function: Any, seconds: list[float]) -> Any:
        """Returns a function that adds its own seconds."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return result

        return timed


def by_fabric(args: argparse.Namespace, timed: Timed) -> list[torch.Tensor]:
    """Trains with Fabric. Returns the losses of this rank."""
    if args.strategy == "fsdp":
        fsdp = strategy_class(args, FabricFSDPOnCPU)
        strategy = fsdp(auto_wrap_policy=ModuleWrapPolicy([Block]), state_dict_type="sharded")
    else:
        sharded = strategy_class(args, FabricModelParallel)
        strategy = sharded(shard, data_parallel_size=RANKS, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(model_of(args))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        timed(fabric.load, timed.load_s)(args.resume, state)
    losses = []
    for step in range(state["step"] + 1, args.steps + 1):
        loss = loss_of(model, step, args.width)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % args.save_every == 0:
            state["step"] = step
            timed(fabric.save, timed.save_s)(f"{args.folder}/step_{step}.ckpt", state)
    if hasattr(strategy, "wait"):  # saves in the background
        strategy.wait()
    return losses


class Module(lightning.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.losses: list[torch.Tensor] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = model_of(self.args)
            if self.args.strategy == "model_parallel":
                shard(self.model, self.device_mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def training_step(self, _batch: Any, _index: int) -> torch.Tensor:
        loss = loss_of(self.model, self.global_step + 1, self.args.width)
        self.losses.append(loss.detach())
        return loss


def by_trainer(args: argparse.Namespace, timed: Timed) -> list[torch.Tensor]:
    """Trains with the Trainer. Returns the losses of this rank."""
    if args.strategy == "fsdp":
        fsdp = strategy_class(args, FSDPOnCPU)
        strategy = fsdp(auto_wrap_policy=ModuleWrapPolicy([Block]), state_dict_type="sharded")
    else:
        sharded = strategy_class(args, ModelParallelStrategy)
        strategy = sharded(data_parallel_size=RANKS, tensor_parallel_size=1)
    strategy.save_checkpoint = timed(strategy.save_checkpoint, timed.save_s)
    strategy.load_checkpoint = timed(strategy.load_checkpoint, timed.load_s)
    saves = ModelCheckpoint(
        args.folder,
        "step_{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=args.save_every,
        save_top_k=args.keep,
        monitor="step" if args.keep > 0 else None,
        mode="max",
        save_last=args.save_last,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=args.steps,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    module = Module(args)
    # Steps draw their own samples: the Trainer only counts with these.
    loader = torch.utils.data.DataLoader(range(args.steps), batch_size=None)
    trainer.fit(module, loader, ckpt_path=args.resume)
    return module.losses


def main() -> None:
    args = parse()
    use_fsdp_on_cpu()
    timed = Timed()
    losses = torch.stack({"fabric": by_fabric, "trainer": by_trainer}[args.api](args, timed))
    gathered = [torch.empty_like(losses) for _ in range(RANKS)]
    dist.all_gather(gathered, losses)
    if dist.get_rank() == 0:
        first = args.steps - len(losses) + 1
        exact = dict(enumerate(torch.stack(gathered, 1).tolist(), first))
        print(json.dumps({"losses": exact, "save_s": timed.save_s, "load_s": timed.load_s}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
