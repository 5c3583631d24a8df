"""Times the saves and the resume of frameworks with DCPX_INSTALL=1 and without, in pairs.

    DCPX_FRAMEWORKS=.venv-frameworks python tests/bench/frameworks.py accelerate --rounds 6

`make test-frameworks` makes the environments. Each round trains the example of a framework on two
ranks, saving twice, and resumes from the first save: once with the hook (with `--adapters`, and for
Megatron-Core always, by our adapter), once without, in a random order, in folders of their own; the
losses must be equal. A round before them is not counted. Prints medians of seconds (of the last
save, on rank 0), and of the ratios of stock to ours the median, the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Arguments for a model of some hundred MB with its optimizer, and for a resume from FOLDER.
FRAMEWORKS: dict[str, tuple[list[str], list[str]]] = {
    "torchtitan": (["--layers", "24"], ["--resume", "{}/checkpoint/step-2"]),
    "accelerate": (["--width", "2048", "--layers", "8"], ["--resume", "{}/step_2"]),
    "trainer": (["--width", "512", "--layers", "8"], ["--resume", "{}/checkpoint-2"]),
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


def run(framework: str, folder: Path, *arguments: str, hook: bool) -> dict[str, Any]:
    """Returns what the example prints at its end."""
    bin_folder = Path(os.environ["DCPX_FRAMEWORKS"]).absolute() / framework / "bin"
    script = ROOT / "examples" / "frameworks" / f"train_{framework}.py"
    environment = {name: text for name, text in os.environ.items() if name[:5] != "DCPX_"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if hook:
        environment["DCPX_INSTALL"] = "1"
    command = [str(bin_folder / "torchrun"), "--standalone", "--nproc-per-node=2", str(script)]
    ended = subprocess.run(
        [*command, str(folder), *arguments], env=environment, cwd=folder.parent,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"losses"')]
    if ended.returncode or not lines:
        raise SystemExit(f"{framework} failed:\n{ended.stdout}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def one_round(
    framework: str, root: Path, sizes: list[str], adapter: list[str]
) -> dict[tuple[str, bool], float]:
    """Returns seconds by what was timed and whether it was ours; compares the losses.

    Ours is the hook, or with `adapter` the example with these arguments.
    """
    model, resume = FRAMEWORKS[framework]
    model = sizes or model
    found: dict[tuple[str, bool], float] = {}
    losses = []
    for is_ours in random.sample([True, False], 2):
        folder = root / ("ours" if is_ours else "stock")
        hook = is_ours and not adapter
        own = [*model, *(adapter if is_ours else [])]
        trained = run(framework, folder, *own, "--steps", "4", "--save-every", "2", hook=hook)
        files = folder.rglob("*.distcp")
        found["bytes", is_ours] = sum(path.stat().st_size for path in files) / len(
            trained["save_s"]
        )
        at = [argument.format(folder) for argument in resume]
        again = root / "resumed"
        resumed = run(framework, again, *own, "--steps", "4", "--save-every", "100", *at, hook=hook)
        found["save", is_ours] = trained["save_s"][-1]
        found["resume", is_ours] = sum(resumed["load_s"])
        losses.append((trained["losses"], resumed["losses"]))
        shutil.rmtree(folder)
        shutil.rmtree(again, ignore_errors=True)  # some save as they end
    if losses[0] != losses[1]:
        raise SystemExit(f"{framework}: the losses differ: {losses}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "frameworks", nargs="*", choices=[[], *FRAMEWORKS], default=list(FRAMEWORKS)
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--adapters", action="store_true", help="ours by its adapter, not the hook")
    parser.add_argument("--sizes", default="", help="arguments of the example in place of ours")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: give 1 or more")
    print("| framework | MB | what | stock s | ours s | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for framework in args.frameworks:
        rounds = []
        for _ in range(args.rounds + 1):
            with tempfile.TemporaryDirectory(dir=".") as root:
                adapter = ADAPTERS[framework] if args.adapters or framework == "megatron" else []
                sizes = args.sizes.split()
                rounds.append(one_round(framework, Path(root).absolute(), sizes, adapter))
        for what in ("save", "resume"):
            pairs = [(one[what, False], one[what, True]) for one in rounds[1:]]
            stock, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratios = sorted(theirs / own for theirs, own in pairs)
            middle = statistics.median(ratios)
            megabytes = rounds[0]["bytes", True] / 1e6
            print(
                f"| {framework} | {megabytes:.0f} | {what} | {stock:.3g} | {ours:.3g} | "
                f"{middle:.3g} ({ratios[0]:.3g} to {ratios[-1]:.3g}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
