"""Times the saves and the resume of frameworks by us and by stock, in turns.

    DCPX_FRAMEWORKS=.venv-frameworks python tests/bench/frameworks.py accelerate --rounds 6

`make test-frameworks` makes the environments. Each round trains the example of a framework on two
ranks, saving twice, and resumes from the first save: with DCPX_INSTALL=1 ("hook"), by our adapter,
and without either ("stock"), also with saves in the background where the framework has some; all in
a random order, in folders of their own, and with equal losses. A round before them is not counted.
Prints medians of seconds of the last save on rank 0 (how long the training stands still) and of the
resume from disk, and of the ratios of stock to ours the median, the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Arguments for a model of some hundred MB with its optimizer, and for a resume from FOLDER.
FRAMEWORKS: dict[str, tuple[list[str], list[str]]] = {
    "torchtitan": (["--layers", "24"], ["--resume", "{}/checkpoint/step-2"]),
    "accelerate": (["--width", "2048", "--layers", "8"], ["--resume", "{}/step_2"]),
    "trainer": (["--width", "1024", "--layers", "4"], ["--resume", "{}/checkpoint-2"]),
    "lightning": (["--width", "2048", "--layers", "8"], ["--resume", "{}/step_2.ckpt"]),
    "megatron": (["--width", "1024", "--layers", "2"], ["--resume", "{}/iter_2"]),
}
# Arguments that make the example use our adapter.
ADAPTERS = {
    "torchtitan": ["--manager", "torch_dcpx.integrations.torchtitan:DcpxCheckpointManager"],
    "accelerate": ["--accelerator", "torch_dcpx.integrations.accelerate:DcpxAccelerator"],
    "trainer": ["--callback", "torch_dcpx.integrations.trainer:DcpxCallback"],
    "lightning": [
        *("--strategy-class", "torch_dcpx.integrations.lightning:DcpxModelParallelStrategy"),
    ],
    "megatron": [
        *("--save-strategy", "torch_dcpx.integrations.megatron:DcpxSaveStrategy"),
        *("--load-strategy", "torch_dcpx.integrations.megatron:DcpxLoadStrategy"),
    ],
}
# Arguments for saves in the background, where the framework itself has some.
BACKGROUND = {"torchtitan": ["--async-mode", "async"], "megatron": ["--async-save", "forked"]}
NO_HOOK = ("megatron",)  # which calls subclasses of DCP's


class Side(NamedTuple):
    """One way to train; `stock` names the one that it is compared with."""

    name: str
    stock: str
    arguments: list[str]
    has_hook: bool = False


def sides_of(framework: str) -> list[Side]:
    """Returns what a round of a framework runs."""
    adapter, more = ADAPTERS[framework], BACKGROUND.get(framework)
    sides = [Side("stock", "stock", [])]
    if framework not in NO_HOOK:
        sides.append(Side("hook", "stock", [], has_hook=True))
    sides.append(Side("adapter", "stock", adapter))
    if more is not None:
        sides.append(Side("stock, background", "stock, background", more))
        sides.append(Side("adapter, background", "stock, background", [*adapter, *more]))
    return sides


def run(framework: str, side: Side, folder: Path, *arguments: str) -> dict[str, Any]:
    """Returns what the example prints at its end."""
    bin_folder = Path(os.environ["DCPX_FRAMEWORKS"]).absolute() / framework / "bin"
    script = ROOT / "examples" / "frameworks" / f"train_{framework}.py"
    environment = {name: text for name, text in os.environ.items() if name[:5] != "DCPX_"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if side.has_hook:
        environment["DCPX_INSTALL"] = "1"
    command = [str(bin_folder / "torchrun"), "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run(
        [*command, str(folder), *arguments], env=environment, cwd=folder.parent,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"losses"')]
    if not lines:
        raise SystemExit(f"{framework}, {side.name}, failed:\n{ended.stdout}")
    # Without destroy_process_group a thread of gloo may let go of a tensor while Python ends:
    # std::terminate, behind the result, with stock as with us.
    if ended.returncode:
        print(f"{framework}, {side.name}: {ended.returncode} behind its result", file=sys.stderr)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def evict(folder: Path) -> None:
    """Drops files from the page cache: a job that resumes has not written them just now."""
    for path in filter(Path.is_file, folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def one_round(framework: str, root: Path, sizes: list[str]) -> dict[tuple[str, str], float]:
    """Returns seconds by what was timed and by which side; compares the losses."""
    model, resume = FRAMEWORKS[framework]
    model = sizes or model
    found: dict[tuple[str, str], float] = {}
    losses = {}
    sides = sides_of(framework)
    for side in random.sample(sides, len(sides)):
        folder, again = root / "trained", root / "resumed"
        own = [*model, *side.arguments, "--steps", "4"]
        trained = run(framework, side, folder, *own, "--save-every", "2")
        size = sum(path.stat().st_size for path in folder.rglob("*.distcp"))
        found["MB", side.name] = size / len(trained["save_s"]) / 1e6
        found["save", side.name] = trained["save_s"][-1]
        losses[side.name] = [trained["losses"]]
        if "background" not in side.name:
            evict(folder)
            at = [argument.format(folder) for argument in resume]
            resumed = run(framework, side, again, *own, "--save-every", "100", *at)
            found["resume", side.name] = sum(resumed["load_s"])
            losses[side.name].append(resumed["losses"])
        shutil.rmtree(folder)
        shutil.rmtree(again, ignore_errors=True)  # some save as they end
    if any(losses[side.name] != losses[side.stock] for side in sides):
        raise SystemExit(f"{framework}: the losses differ: {losses}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "frameworks", nargs="*", choices=[[], *FRAMEWORKS], default=list(FRAMEWORKS)
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sizes", default="", help="arguments of the example in place of ours")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: give 1 or more")
    print("| framework | MB | what | by | stock s | ours s | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for framework in args.frameworks:
        rounds = []
        for _ in range(args.rounds + 1):
            with tempfile.TemporaryDirectory(dir=".") as root:
                rounds.append(one_round(framework, Path(root).absolute(), args.sizes.split()))
        for side in sides_of(framework):
            for what in ("save", "resume"):
                if side.name == side.stock or (what, side.name) not in rounds[0]:
                    continue
                pairs = [(one[what, side.stock], one[what, side.name]) for one in rounds[1:]]
                stock, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
                ratios = sorted(theirs / own for theirs, own in pairs)
                print(
                    f"| {framework} | {rounds[0]['MB', side.name]:.0f} | {what} | {side.name} | "
                    f"{stock:.3g} | {ours:.3g} | {statistics.median(ratios):.3g} "
                    f"({ratios[0]:.3g} to {ratios[-1]:.3g}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
