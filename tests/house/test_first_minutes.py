"""A new user pastes the README's blocks and runs the examples as their pages print them.

In an environment with torch and this package alone: what else a page needs it must name.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.bare_venv import environment_of, make_bare_venv
from support.machine import seconds
from support.pages import RUNNER, blocks_of, write_steps
from support.printed import unprinted

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

# An example's command, as its first lines print it, and what it needs besides.
EXAMPLES = {
    path.stem: found[1]
    for path in sorted((ROOT / "examples").glob("*.py"))
    if (found := re.search(r"^    ((?:python|torchrun) .*?\.py)", path.read_text(), re.MULTILINE))
}
NEEDS = {"finetune_meta": ("safetensors", "numpy"), "train_resume": ("numpy",)}
ARGUMENTS = {"train_resume": " --tiny --dir demo"}  # whole it takes minutes: `make demo`
SHOWN = {
    "fsdp2_resume": (
        "resumed step-3 of ['step-2', 'step-3']",
        "the same bits on 2, 3 and 1 ranks: True",
    ),
}


def run(command: str, commands: Path, folder: Path) -> str:
    """Runs a command of a shell in which the environment is active; returns what it printed."""
    result = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env={**environment_of(commands), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds(900),
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}"
    return result.stdout


@pytest.mark.slow  # two jobs of torchrun
@pytest.mark.multirank
def test_the_readme_runs_from_top_to_bottom_as_it_is_printed(tmp_path: Path) -> None:
    commands = make_bare_venv(tmp_path / "venv")
    folder = tmp_path / "home"
    folder.mkdir()
    steps = write_steps(blocks_of(README, "README.md"), tmp_path / "steps.json")
    printed = run(f"python {RUNNER} {steps}", commands, folder)
    assert re.search(r"^committed +whole +100 .* step-100$", printed, re.MULTILINE), printed
    assert re.search(r"^fine +C\+\+ extension", printed, re.MULTILINE), printed
    said = re.findall(r"^torchrun .*train\.py  # (.+)$", README, re.MULTILINE)
    assert len(said) == 2
    shown = "```text\n{}\n{}\n```\n".format(*said)
    assert unprinted(blocks_of(shown, "README.md"), printed) == [], printed


def test_the_readme_is_short_and_names_every_requirement() -> None:
    assert README.count("\n") < 80
    for word in ("torch 2.9", "click", "rich", "numpy", "g++", "make", "Python 3.10", "minutes"):
        assert word in README


@pytest.mark.slow  # each starts torch, some of them ranks
@pytest.mark.multirank
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_by_the_command_that_it_prints(name: str, tmp_path: Path) -> None:
    commands = make_bare_venv(tmp_path / "venv", *NEEDS.get(name, ()))
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    printed = run(EXAMPLES[name] + ARGUMENTS.get(name, ""), commands, folder)
    assert [line for line in SHOWN.get(name, ()) if line not in printed] == [], printed
    left = {path.name for path in folder.iterdir()} - {"examples"}
    assert left <= {"build", "demo"}, left  # nothing lies about


def test_every_example_prints_its_command() -> None:
    scripts = {p.stem for p in (ROOT / "examples").glob("*.py") if '"__main__"' in p.read_text()}
    assert scripts - {"train_worker"} == set(EXAMPLES)
