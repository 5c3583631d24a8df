"""A training whose checkpoints are configured by Hydra, and that goes on where it was.

    python examples/frameworks/train_hydra.py steps=20 checkpoint.keep_last=3

Needs hydra-core. Hydra makes a directory for each run, by its time: checkpoints lie beside these,
beneath a name of your own, or the next run would not find them.
"""

from __future__ import annotations

import json

import hydra
import torch
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="hydra", config_name="train")
def main(config: DictConfig) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    # "all": lists and dicts, not OmegaConf's own.
    with hydra.utils.instantiate(config.checkpoint, _convert_="all") as manager:
        start = manager.resume(model=model, optimizer=optimizer).step or 0
        losses = {}
        for step in range(start + 1, config.steps + 1):
            batch = torch.rand(8, 16, generator=torch.Generator().manual_seed(step))
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
            if manager.should_save(step):
                manager.save(step, model=model, optimizer=optimizer, metrics={"loss": losses[step]})
    print(json.dumps({"start": start, "losses": losses}))


if __name__ == "__main__":
    main()
