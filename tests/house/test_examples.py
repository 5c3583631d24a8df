"""Every example shows what it says."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_dcpx as dcpx

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

# What each must print among other lines. The rest of examples/*.py has tests of its own.
SHOWN = {
    "quickstart": (
        "DcpxReader: step 100, equal bit for bit: True",
        "stock FileSystemReader: step 100, equal bit for bit: True",
        "B checked, ok: True",
        "refused: missing ('steps',), shapes ['model.weight', 'model.bias']",
    ),
    "single_process": (
        "loaded [0.0, 1.0, 2.0, 3.0], epoch 3",
        "resumed step-3; kept: ['step-3']",
        "losses equal the uninterrupted ones bit for bit: True",
        "torch.distributed initialised: False",
    ),
    "asynchronous": (
        "loaded the weights of the call: [0.0]",
        "the next save raised: no space left, says this example",
        "what failed was never a checkpoint: NotCommittedError",
        "and the save after that went well",
        "on_busy='skip': the result is None",
        "on_busy='error': ConcurrentSaveError",
        "on_busy='wait': the first one has ended: True",
    ),
    "custom_save_planner": (
        "with the planner 0.3 of them",
        "step 5, names that nobody asked for: ()",
        "weight torch.float32, rounded to bfloat16: 0.333984375",
        "bias, the average: [0.5, 0.5, 0.5]",
    ),
    "custom_load_planner": (
        "without the planner: missing ['average.bias', 'average.weight', 'model.adapter']",
        "filled ['average.bias', 'average.weight', 'model.adapter']",
        "average is the stored weight: True",
        "adapter: [[0.0, 0.0], [0.0, 0.0]], step 7",
    ),
    "tracker": (
        "the load raised, as it does without a tracker",
        "saves logged: ['step-1', 'step-2', 'step-3']",
        "each stalled the training for no longer than it took: True",
        "loads logged: ['step-3']",
        "failures logged: ['NotCommittedError']",
    ),
}
ELSEWHERE = {"fsdp2_resume", "finetune_meta", "train_resume"}  # test_first_minutes runs them


@pytest.fixture(autouse=True)
def _saves_end_here() -> Iterator[None]:
    yield
    dcpx.close()


@pytest.mark.parametrize("name", SHOWN)
def test_example_shows_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line for line in SHOWN[name] if line not in printed] == [], printed


def test_every_example_is_run_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    scripts = {p.stem for p in EXAMPLES.glob("*.py") if '"__main__"' in p.read_text()}
    scripts -= {"train_worker"}  # train_resume starts it
    assert scripts == set(SHOWN) | ELSEWHERE
    assert [path.name for path in EXAMPLES.glob("*.py") if f"`{path.name}`" not in listed] == []


def test_example_is_short_and_says_how_it_is_run() -> None:
    for name in (*SHOWN, "fsdp2_resume"):
        source = (EXAMPLES / f"{name}.py").read_text()
        assert source.count("\n") <= 100 and f"python examples/{name}.py" in source, name
