"""Trains a small Llama with torchtitan and FSDP, saves every few steps, goes on from the newest.

    torchrun --nproc-per-node 2 examples/frameworks/train_torchtitan.py RUN

Knows nothing of torch-dcpx. The last line is JSON: the losses of each step, exact, and how many
seconds each save and the load took.
"""

from __future__ import annotations

import argparse
import copy
import json
import pkgutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan_on_cpu  # first: torchtitan's modules copy what it sets
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

SEQUENCE = 64


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_others: Any) -> None:
        super().__init__()

    def encode(self, *_args: Any, **_kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_args: Any, **_kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


class Tokens(IterableDataset):
    """Random tokens, the same in each run, others on each rank. Goes on where a state says."""

    def __init__(self, rank: int, end: int) -> None:
        self.rank, self.end, self.at = rank, end, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.end:
            self.at += 1
            generator = torch.Generator().manual_seed(1000 * self.at + self.rank)
            tokens = torch.randint(2048, (SEQUENCE + 1,), generator=generator)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class RandomLoader(ParallelAwareDataloader):
    """torchtitan's loader, over `Tokens`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        samples: int = 1 << 30  # of each rank

    def __init__(
        self,
        config: Any,
        *,
        dp_rank: int,
        dp_world_size: int,
        local_batch_size: int,
        **_others: Any,
    ) -> None:
        tokens = Tokens(dp_rank, config.samples)
        super().__init__(tokens, dp_rank, dp_world_size, batch_size=local_batch_size)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where the checkpoints go: FOLDER/checkpoint/step-2, ...")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument(
        "--resume", default="", help="the checkpoint to go on from if FOLDER has none"
    )
    modes = ("disabled", "async", "async_with_pinned_mem")
    parser.add_argument("--async-mode", choices=modes, default="disabled")
    parser.add_argument("--new-ranks", action="store_true", help="more or fewer ranks than before")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1 << 30, help="data of each rank")
    stock = "torchtitan.components.checkpointer:CheckpointManager"
    parser.add_argument("--manager", default=stock, help="class of the checkpoint manager")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="more options of its Config"
    )
    return parser.parse_args()


def configured(args: argparse.Namespace) -> Trainer.Config:
    """Returns torchtitan's configuration of the run."""
    manager: Any = pkgutil.resolve_name(args.manager)
    more = {
        name: json.loads(value) for name, _, value in (each.partition("=") for each in args.set)
    }
    spec = model_registry("debugmodel")
    model: Any = spec.model
    model.layers = [copy.deepcopy(model.layers[0]) for _ in range(args.layers)]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())  # flex trains on GPUs only
    return Trainer.Config(
        model_spec=spec,
        dump_folder=args.folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=SEQUENCE,
            steps=args.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomLoader.Config(samples=args.samples),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=manager.Config(
            **{
                "enable": True,
                "interval": args.save_every,
                "initial_load_path": str(Path(args.resume).resolve()) if args.resume else "",
                "initial_load_model_only": False,
                "last_save_model_only": False,
                "async_mode": args.async_mode,
                # torchtitan loads the place in the data on the same number of ranks only.
                "exclude_from_loading": ["dataloader"] if args.new_ranks else [],
                **more,
            }
        ),
        activation_checkpoint=None,
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )


class Watch:
    """A trainer's exact losses, and the seconds that it waited in saves and in the load."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.losses: dict[int, float] = {}
        self.save_s: list[float] = []
        self.load_s: list[float] = []
        self._log = trainer.metrics_processor.log
        self._save, self._load = trainer.checkpointer.save, trainer.checkpointer.load
        trainer.metrics_processor.log = self.log
        trainer.checkpointer.save, trainer.checkpointer.load = self.save, self.load

    def log(self, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        self.losses[step] = loss
        self._log(step, loss, *args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> bool:
        start = time.perf_counter()
        is_saved: bool = self._save(*args, **kwargs)
        if is_saved:
            self.save_s.append(time.perf_counter() - start)
        return is_saved

    def load(self, *args: Any, **kwargs: Any) -> bool:
        start = time.perf_counter()
        is_loaded: bool = self._load(*args, **kwargs)
        self.load_s.append(time.perf_counter() - start)
        return is_loaded


def main() -> None:
    args = parse()
    init_logger()
    trainer = configured(args).build()
    torchtitan_on_cpu.use_gloo(trainer)
    watch = Watch(trainer)
    if trainer.config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(0, last_step=True)
    else:
        trainer.train()
    trainer.close()  # waits for the last save
    if torch.distributed.get_rank() == 0:
        result = {"losses": watch.losses, "save_s": watch.save_s, "load_s": watch.load_s}
        print(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
