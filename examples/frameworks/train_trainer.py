"""Trains with transformers' Trainer and FSDP2, saves every few steps, resumes from a checkpoint.

    torchrun --nproc-per-node 2 examples/frameworks/train_trainer.py RUN
    torchrun --nproc-per-node 2 examples/frameworks/train_trainer.py RUN --resume RUN/checkpoint-2

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
from fsdp_on_cpu import use_fsdp_on_cpu
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

BATCH = 2  # samples a rank and step
TOKENS = 256


class Clock(TrainerCallback):
    """Notes when a step has ended: what callbacks do then for a save belongs to the save."""

    ended_s = 0.0

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.ended_s = time.perf_counter()


class Watched(Trainer):
    """A Trainer that keeps its exact losses and the seconds of its saves and of its load."""

    def __init__(self, *, callbacks: list[TrainerCallback], **arguments: Any) -> None:
        self.clock = Clock()
        super().__init__(callbacks=[self.clock, *callbacks], **arguments)
        self.losses: list[torch.Tensor] = []
        self.save_s: list[float] = []
        self.load_s: list[float] = []  # of the model and of the optimizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if not isinstance(loss, tuple):  # of an evaluation, with outputs
            self.losses.append(loss.detach().reshape(1))
        return loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        is_saving = self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if is_saving:
            self.save_s.append(time.perf_counter() - self.clock.ended_s)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        super()._load_from_checkpoint(*args, **kwargs)
        self.load_s.append(time.perf_counter() - start)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        super()._load_optimizer_and_scheduler(*args, **kwargs)
        self.load_s.append(time.perf_counter() - start)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where the checkpoints go: FOLDER/checkpoint-2, ...")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--resume", help='the checkpoint to go on from, or "newest"')
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--callback", action="append", default=[], help="class of a callback, MODULE:CLASS"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="more TrainingArguments"
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    use_fsdp_on_cpu()
    more = {
        name: json.loads(value) for name, _, value in (each.partition("=") for each in args.set)
    }
    settings = TrainingArguments(
        output_dir=args.folder,
        max_steps=args.steps,
        save_steps=args.save_every,
        logging_steps=1,
        per_device_train_batch_size=BATCH,
        learning_rate=more.pop("learning_rate", 0.001),
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        },
        report_to="none",
        disable_tqdm=True,
        **more,
    )
    set_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    texts = torch.randint(TOKENS, (512, 16)).tolist()
    data: Any = [{"input_ids": text, "labels": text} for text in texts]
    trainer = Watched(
        model=LlamaForCausalLM(config),
        args=settings,
        train_dataset=data,
        eval_dataset=data[:16],
        callbacks=[pkgutil.resolve_name(name)() for name in args.callback],
    )
    trainer.train(resume_from_checkpoint=True if args.resume == "newest" else args.resume)
    steps = len(trainer.losses)
    losses = trainer.accelerator.gather(torch.cat(trainer.losses)).reshape(-1, steps).T.tolist()
    if trainer.is_world_process_zero():
        exact = dict(enumerate(losses, args.steps - steps + 1))
        print(json.dumps({"losses": exact, "save_s": trainer.save_s, "load_s": trainer.load_s}))


if __name__ == "__main__":
    main()
