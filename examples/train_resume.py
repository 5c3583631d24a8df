"""Trains, dies in the middle of a save, resumes on other numbers of ranks, and proves it.

    python examples/train_resume.py

Phase 1: two ranks train and save through `DcpxWriter`; one is killed in the middle of a save.
Phase 2: the newest committed checkpoint is resumed through `DcpxReader`, by two ranks (the same
losses, bit for bit) and by three, which go on training.
Phase 3: checkpoints of torch-dcpx through stock DCP, and of stock DCP through torch-dcpx: equal
bit for bit. Phase 4: both sides timed, turn about. Exit code 0 says that all of it held.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from bitwise import compare, load_fresh, size_on_disk
from killed_save import count_data_bytes
from side_by_side import measure
from torch.distributed.checkpoint import FileSystemReader

from torch_dcpx import DcpxReader

HERE = Path(__file__).resolve().parent
LAUNCH_TIMEOUT_S = 600.0  # for one torchrun; then it is ended, and the demo fails


class DemoError(Exception):
    """Something that the demo promises did not hold."""


@dataclass(frozen=True)
class Schedule:
    """When the runs save, die and stop, in steps. `config` is a key of `byte_gpt.CONFIGS`."""

    config: str
    save_every: int
    kill_at: int  # a multiple of save_every, after the second save
    last_step: int
    timed_config: str
    timed_rounds: int


DEMO = Schedule("demo", 8, kill_at=24, last_step=32, timed_config="large", timed_rounds=7)
TINY = Schedule("tiny", 2, kill_at=6, last_step=8, timed_config="tiny", timed_rounds=1)


def torchrun(ranks: int, schedule: Schedule, run: Path, *arguments: object) -> str | None:
    """Runs `train_worker.py` on some ranks; its losses go to `run`.jsonl.

    Returns:
        None where every rank succeeded, else what torchrun says of the failure.

    Raises:
        DemoError: the run was not over after LAUNCH_TIMEOUT_S.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "localhost", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "train_worker.py"), "--config", schedule.config]
    command += ["--save-every", str(schedule.save_every), "--losses", f"{run}.jsonl"]
    command += [str(argument) for argument in arguments]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    messages = Path(f"{run}.log")
    with messages.open("w") as log, subprocess.Popen(command, stderr=log, env=environment) as agent:
        try:
            code = agent.wait(LAUNCH_TIMEOUT_S)
        except BaseException as error:
            agent.terminate()  # torchrun ends its ranks
            if isinstance(error, subprocess.TimeoutExpired):
                raise DemoError(f"not over after {LAUNCH_TIMEOUT_S} s, see {messages}") from error
            raise
    return None if code == 0 else messages.read_text()


def newest_committed(checkpoints: Path) -> Path:
    """Returns the checkpoint of the highest step that has a `.metadata`: the others never were."""
    committed = [path.parent for path in checkpoints.glob("step-*/.metadata")]
    return max(committed, key=lambda path: int(path.name.removeprefix("step-")))


def read_losses(run: Path) -> dict[int, str]:
    """Returns the losses of a run by step, as hexadecimal floats: all bits are in them."""
    lines = Path(f"{run}.jsonl").read_text().splitlines()
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def train_until_killed(root: Path, schedule: Schedule) -> None:
    """Phase 1. Raises DemoError unless rank 1 died mid-save and nothing was committed."""
    failure = torchrun(
        2, schedule, root / "first", "--checkpoints", root / "ckpt",
        "--last-step", schedule.last_step, "--kill-at", schedule.kill_at,
    )  # fmt: skip
    if failure is None or "SIGKILL" not in failure:
        raise DemoError(f"torchrun should report a rank killed by SIGKILL, but: {failure}")
    torn = root / "ckpt" / f"step-{schedule.kill_at}"
    print(f"  torchrun failed, as it must. On disk in {torn.name}:")
    for path in sorted(torn.iterdir()):
        size = path.stat().st_size
        print(f"    {path.name:16} {size:>12,} B, of them written {count_data_bytes(path):,} B")
    if (torn / ".metadata").exists() or not list(torn.glob("__*.distcp")):
        raise DemoError(f"{torn} should hold data files and no .metadata")
    print("    no .metadata: nothing was committed, no reader takes it for a checkpoint")


def check_same_losses(root: Path, schedule: Schedule, checkpoint: Path) -> None:
    """Phase 2a. Resumes on 2 ranks. Raises DemoError where a loss differs in a bit."""
    failure = torchrun(
        2, schedule, root / "again", "--resume", checkpoint, "--last-step", schedule.kill_at
    )
    if failure:
        raise DemoError(failure)
    first, again = read_losses(root / "first"), read_losses(root / "again")
    for step, loss in again.items():
        print(f"  step {step:3d}  first run {first[step]}  resumed {loss}")
    if not again or any(first[step] != loss for step, loss in again.items()):
        raise DemoError("the resumed losses differ from the first run's")
    print("  the same losses, bit for bit")


def go_on_with_three(root: Path, schedule: Schedule, checkpoint: Path) -> None:
    """Phase 2b. Resumes on 3 ranks and trains to the end; stock DCP saves the end as well."""
    failure = torchrun(
        3, schedule, root / "three", "--resume", checkpoint, "--checkpoints", root / "ckpt",
        "--last-step", schedule.last_step, "--stock-twin", root / "stock-twin",
    )  # fmt: skip
    if failure:
        raise DemoError(failure)


def check_interop(root: Path, schedule: Schedule) -> None:
    """Phase 3. Raises DemoError with the names where a byte of a tensor or a value differs."""
    last = root / "ckpt" / f"step-{schedule.last_step}"
    two = root / "ckpt" / f"step-{schedule.kill_at - schedule.save_every}"
    mismatches: list[str] = []
    for checkpoint, ranks in ((two, 2), (last, 3)):
        ours = load_fresh(DcpxReader(checkpoint), fill=0xA5)
        stock = load_fresh(FileSystemReader(checkpoint), fill=0x5A)
        result = compare(ours, stock)
        print(f"  {checkpoint.name}, saved by DcpxWriter on {ranks} ranks, through stock DCP and")
        print(f"    through DcpxReader: {result}")
        mismatches += result.mismatches
    twin = load_fresh(DcpxReader(root / "stock-twin"), fill=0xC3)
    result = compare(ours, twin)
    print(f"  {last.name}, saved by stock DCP on 3 ranks as well ({root.name}/stock-twin), through")
    print(f"    DcpxReader: {result}")
    mismatches += result.mismatches
    if mismatches:
        raise DemoError(f"differ: {', '.join(mismatches)}")


def print_header(root: Path) -> None:
    """Prints the command and the machine, so that the figures below mean something."""
    root.mkdir(parents=True, exist_ok=True)
    kind = subprocess.run(
        ["stat", "--file-system", "--format=%T", root], capture_output=True, text=True, check=False
    ).stdout.strip()
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    print(f"command: {' '.join([Path(sys.executable).name, *sys.argv])}")
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, {memory_bytes / 1e9:.1f} GB memory, "
        f"checkpoints on {kind or 'an unknown file system'}"
    )


def run_demo(root: Path, schedule: Schedule) -> None:
    """Runs all phases in an empty directory. Raises DemoError at the first that does not hold."""
    print(f"\nphase 1: two ranks train and save; rank 1 is killed while saving {schedule.kill_at}")
    train_until_killed(root, schedule)

    checkpoint = newest_committed(root / "ckpt")
    size = size_on_disk(checkpoint)
    print(f"\nphase 2: resume from the newest committed checkpoint: {checkpoint.name}, {size:,} B")
    check_same_losses(root, schedule, checkpoint)
    go_on_with_three(root, schedule, checkpoint)

    print("\nphase 3: the same bits through torch-dcpx and through stock DCP")
    check_interop(root, schedule)

    print("\nphase 4: seconds, torch-dcpx and stock DCP turn about, fsync on, fresh directories")
    print(measure(root / "timed", schedule.timed_config, schedule.timed_rounds))


def main() -> int:
    """Runs the demo and returns its exit code."""
    parser = argparse.ArgumentParser(description="Train, die, resume, compare; see the module.")
    parser.add_argument("--dir", type=Path, default=HERE.parent / "build" / "demo",
                        help="emptied at the start")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a model of 15 thousand parameters")
    arguments = parser.parse_args()
    root: Path = arguments.dir
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # phases 3, 4: one process
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    began = time.monotonic()
    shutil.rmtree(root, ignore_errors=True)
    print_header(root)
    try:
        run_demo(root, TINY if arguments.tiny else DEMO)
    except DemoError as error:
        print(f"\nFAILED: {error}")
        return 1
    print(f"\nall held, in {time.monotonic() - began:.0f} s; files are in {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
