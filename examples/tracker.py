"""Logs saves and loads to an experiment tracker, by `dcpx.on_event`.

    python examples/tracker.py

`Tracker` stands for W&B, MLflow or TensorBoard: it appends a line of JSON for each call of `log`.
So this runs without a network. `watch` is the part to copy.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import torch_dcpx as dcpx


class Tracker:
    """A tracker in a file. `wandb.log`, `mlflow.log_metrics` and `SummaryWriter.add_scalar` take
    the same names and numbers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, values: dict[str, float | str]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def watch(tracker: Tracker) -> Callable[[], None]:
    """Logs each save and load from now on; returns a function that ends it."""

    def note(event: dcpx.Event) -> None:
        if isinstance(event, dcpx.SaveEnded):
            values: dict[str, float | str] = {"save/seconds": event.seconds}
            if event.report is not None:
                values["save/stall_seconds"] = event.report.blocked_s
            if event.write is not None:
                values["save/bytes"] = event.write.file_bytes
        elif isinstance(event, dcpx.LoadEnded):
            values = {"load/seconds": event.seconds}
        elif isinstance(event, (dcpx.SaveFailed, dcpx.LoadFailed)):
            values = {"failed": type(event.error).__name__}
        tracker.log({"call": event.call, "path": event.path, **values})

    return dcpx.on_event(note)


def main() -> None:
    model = torch.nn.Linear(64, 64)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tracker = Tracker(root / "run.jsonl")
        end = watch(tracker)

        with dcpx.CheckpointManager(root / "run", keep_last=2) as manager:
            for step in range(1, 4):
                manager.save(step, model=model)
        with dcpx.CheckpointManager(root / "run") as manager:
            manager.resume(model=model)
        try:
            dcpx.load({"model": model}, root / "nowhere")
        except dcpx.NotCommittedError:
            print("the load raised, as it does without a tracker")
        end()

        rows = [json.loads(line) for line in tracker.path.read_text().splitlines()]
        saves = [row for row in rows if "save/seconds" in row]
        print("saves logged:", [Path(row["path"]).name for row in saves])
        stalls = [0 < row["save/stall_seconds"] <= row["save/seconds"] for row in saves]
        print("each stalled the training for no longer than it took:", all(stalls))
        print("loads logged:", [Path(r["path"]).name for r in rows if "load/seconds" in r])
        print("failures logged:", [row["failed"] for row in rows if "failed" in row])


if __name__ == "__main__":
    main()
