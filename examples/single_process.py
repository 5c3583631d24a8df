"""Without torch.distributed: no process group, no launcher, one process.

    python examples/single_process.py

What is saved here loads on any number of ranks, and the other way round.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist

import torch_dcpx as dcpx


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, step: int) -> float:
        batch = torch.rand(16, 8, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main(folder: str) -> None:
    # A dict: tensors are loaded in place, Python values are put into the dict.
    path = f"{folder}/values"
    dcpx.save({"weights": torch.arange(4.0), "epoch": 3}, path)
    state = {"weights": torch.zeros(4), "epoch": None}
    dcpx.load(state, path)
    print(f"loaded {state['weights'].tolist()}, epoch {state['epoch']}")

    # A training: the manager knows what a model's and an optimizer's state are.
    first = Training(seed=0)
    with dcpx.CheckpointManager(f"{folder}/run", keep_last=1, save_every=3) as manager:
        for step in (1, 2, 3):
            first.train(step)
            if manager.should_save(step):
                manager.save(step, model=first.model, optimizer=first.optimizer)
    expected = [first.train(step) for step in (4, 5)]

    again = Training(seed=1)
    with dcpx.CheckpointManager(f"{folder}/run") as manager:
        start = manager.resume(model=again.model, optimizer=again.optimizer)
        print(f"resumed {start.tag}; kept: {manager.tags()}")
    losses = [again.train(step) for step in (4, 5)]
    print(f"losses equal the uninterrupted ones bit for bit: {losses == expected}")
    print(f"torch.distributed initialised: {dist.is_initialized()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
