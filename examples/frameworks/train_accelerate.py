"""Trains with accelerate and FSDP, saves by `save_state`, resumes by `load_state`.

    torchrun --nproc-per-node 2 examples/frameworks/train_accelerate.py RUN
    torchrun --nproc-per-node 2 examples/frameworks/train_accelerate.py RUN --resume RUN/step_2
    torchrun --nproc-per-node 2 examples/frameworks/train_accelerate.py RUN --limit 2

Knows nothing of torch-dcpx. The last line is JSON: the losses of each step on all ranks, exact, and
how many seconds each save and the load took.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import time
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration, set_seed
from fsdp_on_cpu import use_fsdp_on_cpu
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4  # samples a rank and step


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return x + torch.dropout(self.linear(self.norm(x)).relu(), 0.1, self.training)


class Progress:
    """How far a training is. accelerate saves it with everything else."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where the checkpoints go: FOLDER/step_2, ...")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--resume", help="the checkpoint to go on from, such as FOLDER/step_2")
    parser.add_argument(
        "--limit",
        type=int,
        help="keeps so many FOLDER/checkpoints/checkpoint_0, ...; --resume newest finds the last",
    )
    parser.add_argument("--fsdp", type=int, choices=(1, 2), default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    stock = "accelerate:Accelerator"
    parser.add_argument("--accelerator", default=stock, help="class of the accelerator")
    return parser.parse_args()


def prepared(args: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    """Returns the accelerator, and model, optimizer and data that it has prepared."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=args.fsdp,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    is_numbered = args.limit is not None
    project = ProjectConfiguration(
        args.folder, automatic_checkpoint_naming=is_numbered, total_limit=args.limit
    )
    make: Any = pkgutil.resolve_name(args.accelerator)
    accelerator = make(cpu=True, fsdp_plugin=plugin, project_config=project)
    set_seed(0)
    model = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    if args.fsdp == 1:  # the optimizer wants the sharded model; FSDP2 wants both at once
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = accelerator.num_processes * BATCH * args.steps
    data = TensorDataset(torch.randn(samples, args.width))
    # It draws from a generator of its own, so that a resume finds the random states of its ranks.
    loader = DataLoader(data, batch_size=BATCH, generator=torch.Generator())
    set_seed(0, device_specific=True)  # each rank drops out other elements
    if args.fsdp == 1:
        return accelerator, model, *accelerator.prepare(optimizer, loader)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def fill(optimizer: Any, model: nn.Module) -> None:
    """Makes an optimizer's state by a step of zeros: under FSDP1 `load_state` of accelerate 1.15.0
    loads only what the optimizer holds already, and a new one holds nothing.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    args = parse()
    use_fsdp_on_cpu()
    accelerator, model, optimizer, loader = prepared(args)
    progress, load_s = Progress(), []
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        if args.fsdp == 1:
            fill(optimizer, model)
        start = time.perf_counter()
        accelerator.load_state(None if args.resume == "newest" else args.resume)
        load_s.append(time.perf_counter() - start)
    losses, save_s = {}, []
    rest = accelerator.skip_first_batches(loader, progress.step)
    for step, (batch,) in enumerate(rest, progress.step + 1):
        loss = (model(batch) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = accelerator.gather(loss.detach().reshape(1)).tolist()
        progress.step = step
        if step % args.save_every == 0:
            start = time.perf_counter()
            accelerator.save_state(None if args.limit else f"{args.folder}/step_{step}")
            save_s.append(time.perf_counter() - start)
    accelerator.end_training()  # waits for the last save
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "save_s": save_s, "load_s": load_s}))


if __name__ == "__main__":
    main()
