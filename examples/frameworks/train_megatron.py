"""Trains a small GPT of Megatron-Core with tensor parallelism, saves, resumes on any ranks.

    torchrun --nproc-per-node 2 examples/frameworks/train_megatron.py RUN
    torchrun --nproc-per-node 2 examples/frameworks/train_megatron.py RUN --resume RUN/iter_2

--save-strategy and --load-strategy name classes (package.module:Class) whose objects go to
`dist_checkpointing.save` and `load`; without them Megatron's own are used. The last line is JSON:
the losses of each step, exact, how many seconds each save held the training up, how many passed
until it was done, and how many the load took.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_on_cpu import use_megatron_on_cpu

BATCH, LENGTH, WORDS = 2, 16, 128

if not torch.cuda.is_available():
    use_megatron_on_cpu()  # here, because workers of Megatron's import this file


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where the checkpoints go: FOLDER/iter_2, ...")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--resume", help="the checkpoint to go on from, such as FOLDER/iter_2")
    parser.add_argument("--save-strategy", help="a class, as package.module:Class")
    parser.add_argument("--load-strategy", help="a class, as package.module:Class")
    parser.add_argument("--async-save", choices=("forked", "persistent"))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    return parser.parse_args()


def made(name: str | None, default: Any) -> Any:
    """Returns an object of a class that a command line names."""
    if name is None:
        return default
    module, _, cls = name.partition(":")
    return getattr(importlib.import_module(module), cls)()


def model_of(args: argparse.Namespace) -> GPTModel:
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=8,
        tensor_model_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), WORDS, LENGTH)


def state_of(model: GPTModel, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Returns what Megatron saves and loads, with the shards of this rank."""
    sharded = model.sharded_state_dict()
    moments = optimizer.state_dict()
    params = get_param_id_to_sharded_param_map(sharded, model.parameters())
    optim_state_to_sharding_state(moments, params, exclude_keys=("step",))
    rng = ShardedObject("rng", torch.get_rng_state(), (1,), (0,), replica_id=dist.get_rank())
    return {"model": sharded, "optimizer": moments, "rng": rng, "iteration": step}


def load(args: argparse.Namespace, model: GPTModel, optimizer: torch.optim.AdamW) -> int:
    """Fills model and optimizer from a checkpoint; returns its step."""
    for param in model.parameters():
        optimizer.state[param] = {
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    strategy = made(args.load_strategy, TorchDistLoadShardedStrategy())
    state = dist_checkpointing.load(state_of(model, optimizer, 0), args.resume, strategy)
    model.load_state_dict(state["model"])
    step: int = state["iteration"]
    for moments in state["optimizer"]["state"].values():
        moments["step"] = torch.tensor(float(step))  # the same of all: not kept
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return step


class Saver:
    """Saves by a strategy, in the background where asked to, and takes the times."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        stock = TorchDistSaveShardedStrategy("torch_dist", 1)
        self.strategy = made(args.save_strategy, stock)
        self.calls = AsyncCallsQueue(persistent=args.async_save == "persistent")
        self.save_s: list[float] = []  # of the calls
        self.done_s: list[float] = []  # until all is done
        self._began = 0.0

    def save(self, state: dict[str, Any], step: int) -> None:
        folder = Path(self.args.folder, f"iter_{step}")
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self.look(blocking=True)
        self._began = time.perf_counter()
        request = dist_checkpointing.save(
            state, str(folder), self.strategy, async_sharded_save=self.args.async_save is not None
        )
        if request is None:
            self.done_s.append(time.perf_counter() - self._began)
        else:
            self.calls.schedule_async_request(request)
        self.save_s.append(time.perf_counter() - self._began)

    def look(self, *, blocking: bool) -> None:
        """Ends saves that are done, or all of them."""
        if self.calls.maybe_finalize_async_calls(blocking=blocking):
            self.done_s.append(time.perf_counter() - self._began)


def main() -> None:
    args = parse()
    dist.init_process_group("gloo" if torch.cuda.current_device().type == "cpu" else "nccl")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    model = model_of(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saver, began = Saver(args), time.perf_counter()
    done = load(args, model, optimizer) if args.resume else 0
    load_s = time.perf_counter() - began
    losses = {}
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).tril() < 0.5
    for step in range(done + 1, args.steps + 1):
        draw = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (BATCH, LENGTH), generator=draw)
        loss = model(words, places, mask.expand(BATCH, 1, LENGTH, LENGTH), labels=words).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        saver.look(blocking=False)
        if step % args.save_every == 0:
            saver.save(state_of(model, optimizer, step), step)
    saver.look(blocking=True)
    saver.calls.close()
    times = {"save_s": saver.save_s, "done_s": saver.done_s, "load_s": [load_s]}
    del saver  # Megatron's worker asks for its rank as it goes
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, **times}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
