"""FSDP2 on one GPU: trains, is killed in the middle of a save, resumes; bit-equal to a run without.

    python tests/cuda/fsdp_killed.py           the whole, as a stage of on_gpu.sh
    python tests/cuda/fsdp_killed.py train ... one job (see `Job`)

Three jobs, each a process with NCCL: one trains to the end; one saves in the background at every
second step and dies by SIGKILL while the data file of a save is being written; one resumes from
the newest committed checkpoint and trains to the end. In a rehearsal: gloo, on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

EVERY, LAST, KILL_FROM = 2, 12, 6
WIDTH = {"quick": 2048, "full": 4096, "rehearsal": 256}


def is_rehearsal() -> bool:
    return os.environ.get("ON_GPU_REHEARSAL") == "1"


# ---- One job ------------------------------------------------------------------------------------


class Job:
    """One process that trains; `root` holds a folder a save."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        self.root: Path = args.root
        self.kill: bool = args.kill
        self.device = "cpu" if is_rehearsal() else "cuda"
        if self.device == "cuda":
            torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(True)
        backend = "gloo" if self.device == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        torch.manual_seed(1)
        mesh = dist.device_mesh.init_device_mesh(self.device, (1,))
        layers = [torch.nn.Linear(args.width, args.width) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).to(self.device)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.width = args.width

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        parameters, moments = get_state_dict(self.model, self.optimizer)
        return {"model": parameters, "optimizer": moments}

    def step(self, number: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(8, self.width, generator=generator).to(self.device)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Returns a digest of all bits of model and optimizer."""
        import torch

        found = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, dict):
                for key in sorted(value):
                    found.update(str(key).encode())
                    add(value[key])
            elif isinstance(value, torch.Tensor):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                raw = whole.detach().cpu().contiguous().flatten().view(torch.uint8)
                found.update(raw.numpy().tobytes())
            else:
                found.update(repr(value).encode())

        add(self.state())
        return found.hexdigest()

    def train(self, first: int) -> None:
        """Trains behind step `first` to the end, saving in the background where it is to die."""
        import torch_dcpx as dcpx

        if self.kill:
            dcpx.guard_optimizer(self.optimizer)
        handle = None
        for number in range(first + 1, LAST + 1):
            self.step(number)
            if not self.kill or number % EVERY:
                continue
            if handle is not None:
                handle.result()
            path = self.root / f"step-{number}"
            began = time.perf_counter()
            handle = dcpx.async_save(self.state(), path, options=dcpx.WriteOptions(overlap=True))
            print(f"saving {number}: async_save returned after {time.perf_counter() - began:.4f} s")
            if number >= KILL_FROM:
                die_in_the_save(path)

    def resume(self) -> int:
        """Loads the newest committed checkpoint; returns its step."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        import torch_dcpx as dcpx

        newest = max(int(path.parent.name[5:]) for path in self.root.glob("step-*/.metadata"))
        self.step(0)  # makes the optimizer's state
        state = self.state()
        dcpx.load(state, self.root / f"step-{newest}")
        set_state_dict(
            *(self.model, self.optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return newest


def die_in_the_save(path: Path) -> None:
    """Sends SIGKILL to this process while the save's data file is being written; returns only
    where the save was over before that.
    """
    while not (path / ".metadata").exists():
        if any(file.stat().st_blocks for file in path.glob("__*.distcp")):
            os.write(1, b"SIGKILL in the middle of a save\n")
            os.kill(os.getpid(), signal.SIGKILL)


def job(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "resume"])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args(arguments)

    import torch.distributed as dist

    one = Job(args)
    first = one.resume() if args.what == "resume" else 0
    one.train(first)
    print("ENDED", json.dumps({"first": first, "digest": one.digest()}), flush=True)
    dist.destroy_process_group()


# ---- The stage ----------------------------------------------------------------------------------


def run_job(*arguments: str) -> tuple[int, str]:
    """Returns a job's exit status and output, which is printed too."""
    variables = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
    )
    print(f"$ {' '.join(arguments)}\n{done.stdout}exit {done.returncode}", flush=True)
    return done.returncode, done.stdout


def ended(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith("ENDED ")]
    return json.loads(lines[-1].partition(" ")[2]) if lines else {}


def stage(root: Path, width: int, start: Callable[..., tuple[int, str]] = run_job) -> str:
    """Returns what did not hold; empty where all did."""
    common = ["--root", str(root), "--width", str(width)]
    with ThreadPoolExecutor(2) as pool:  # side by side: most of a job is its start
        whole = pool.submit(start, "train", *common)
        status, output = start("train", "--kill", *common)
        whole_status, whole_output = whole.result()
    wanted = ended(whole_output)
    if whole_status or not wanted:
        return f"the run without a kill ended with {whole_status}"
    if status != -signal.SIGKILL or "SIGKILL in the middle of a save" not in output:
        return f"the run that is to die in a save ended with {status}"
    committed = sorted(int(p.parent.name[5:]) for p in root.glob("step-*/.metadata"))
    torn = sorted(int(p.name[5:]) for p in root.glob("step-*") if not (p / ".metadata").exists())
    print(f"committed: {committed}, torn: {torn}")
    if not committed or not torn or max(committed) > min(torn):
        return f"committed {committed}, torn {torn}: the kill was not in the middle of a save"
    status, output = start("resume", *common)
    found = ended(output)
    if status or not found:
        return f"the run that resumes ended with {status}"
    if found["first"] != max(committed):
        return f"resumed from {found['first']}, not from {max(committed)}"
    if found["digest"] != wanted["digest"]:
        return "the resumed run is not bit-equal to the one without a kill"
    short = f"killed in the save of step {torn[0]}, resumed from {found['first']}: bit-equal"
    print("FIGURES", json.dumps({"short": short, "width": width}))
    return ""


def main() -> int:
    mode = "rehearsal" if is_rehearsal() else os.environ.get("ON_GPU_MODE", "quick")
    memory = Path("/dev/shm")
    width = WIDTH[mode]
    # Five saves of 4 layers' weights and two moments, in memory where it holds them.
    needed = 6 * 4 * width * width * 4 * 3
    folder = memory if shutil.disk_usage(memory).free > needed else Path(tempfile.gettempdir())
    prefix = os.environ.get("ON_GPU_PREFIX", "dcpx-") + "fsdp-"
    with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as name:
        wrong = stage(Path(name), width)
    if wrong:
        print(f"REASON {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job(sys.argv[1:])
    else:
        sys.exit(main())
