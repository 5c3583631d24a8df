"""Runs of the examples of frameworks, each in the environment of its own framework.

`make test-frameworks` makes these environments below DCPX_FRAMEWORKS. A run is seen from inside by
`frameworks/witness/sitecustomize.py`: which modules it loaded, what the hook replaced, its log.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.saves import data_files, read_footer

ROOT = Path(__file__).resolve().parents[2]
WITNESS = ROOT / "tests" / "frameworks" / "witness"
DEADLINE_S = 600  # of a run, and of a wait for the place where it is to be killed


@dataclass
class Run:
    """A run that has ended.

    Attributes:
        result: the last line of its output that is JSON: losses, or a digest.
        output: all that it printed.
        processes: what each of its Python processes said as it ended.
        log: lines of our loggers, of all processes.
    """

    result: Any
    output: str
    processes: list[dict[str, Any]]
    log: list[str]

    @property
    def replaced(self) -> Counter[str]:
        """Objects that the hook made ours, by role, of all processes."""
        return sum((Counter(one["replaced"]) for one in self.processes), Counter())

    @property
    def modules(self) -> set[str]:
        """Modules of ours that any process has loaded."""
        return {name for one in self.processes for name in one["modules"]}


class Framework:
    """One framework: its environment, its example, its page.

    Args:
        name: of the environment, of its example (train_NAME.py) and of its page (NAME.md).
        folder: where runs work; relative paths of commands and arguments begin there.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.bin = Path(os.environ["DCPX_FRAMEWORKS"]).absolute() / name / "bin"
        self.script = ROOT / "examples" / "frameworks" / f"train_{name}.py"
        self.page = ROOT / "docs" / "frameworks" / f"{name}.md"
        self.folder = folder
        self._runs = 0
        (folder / "examples").symlink_to(ROOT / "examples")

    def train(self, *arguments: object, ranks: int = 2, hook: bool = True, **variables: str) -> Run:
        """Runs the example to its end under torchrun."""
        return self.run(self.torchrun(*arguments, ranks=ranks), hook=hook, **variables)

    def torchrun(self, *arguments: object, ranks: int = 2) -> list[str]:
        """Returns the command of a run of the example."""
        command = [str(self.bin / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
        return [*command, str(self.script), *map(str, arguments)]

    def run(self, command: list[str], *, hook: bool = True, **variables: str) -> Run:
        """Runs a command to its end; fails with all that it printed if it fails."""
        witness = self._witness()
        ended = subprocess.run(
            command, cwd=self.folder, env=self._environment(witness, hook, variables),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}\n{ended.stdout}"
        return _ended(ended.stdout, witness)

    def kill_before_commit(
        self, nth: int, *arguments: object, ranks: int = 2, hook: bool = True, **variables: str
    ) -> None:
        """Kills all processes of a run (SIGKILL) just before its nth checkpoint is committed."""
        witness = self._witness()
        stop = {"DCPX_WITNESS_STOP_AT": str(nth)}
        with (witness / "output").open("w") as output:
            process = subprocess.Popen(
                self.torchrun(*arguments, ranks=ranks), cwd=self.folder,
                env=self._environment(witness, hook, variables | stop),
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        end = time.monotonic() + DEADLINE_S
        try:
            while not (witness / "stopped").exists():
                said = (witness / "output").read_text
                assert process.poll() is None, f"ended before commit {nth}: {said()}"
                assert time.monotonic() < end, f"no commit {nth} in {DEADLINE_S} s: {said()}"
                time.sleep(0.05)
        finally:
            while _kill_those_with(witness):
                time.sleep(0.05)
            process.wait()

    def commands(self) -> list[str]:
        """Returns the commands of the page: each of its ```sh blocks."""
        return re.findall(r"^ *```sh\n(.*?)^ *```", self.page.read_text(), re.MULTILINE | re.DOTALL)

    def run_page(self) -> list[Run]:
        """Runs the commands of the page from top to bottom, as a user in `folder` would."""
        return [self.run(["bash", "-euc", block], hook=False) for block in self.commands()]

    def _witness(self) -> Path:
        self._runs += 1
        witness = self.folder / f"witness-{self._runs}"
        witness.mkdir()
        return witness

    def _environment(self, witness: Path, hook: bool, variables: dict[str, str]) -> dict[str, str]:
        kept = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("DCPX_", "PYTEST_", "PYTHON", "COV_"))
        }
        own = {
            "PATH": f"{self.bin}:{kept['PATH']}",
            "PYTHONPATH": str(WITNESS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DCPX_WITNESS": str(witness),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return {**kept, **own, **({"DCPX_INSTALL": "1"} if hook else {}), **variables}


def _kill_those_with(witness: Path) -> list[int]:
    """Kills the processes whose environment names a witness; returns those that there were."""
    text, found = f"DCPX_WITNESS={witness}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            is_zombie = "\nState:\tZ" in (folder / "status").read_text()
            if not is_zombie and text in (folder / "environ").read_bytes() + b"\0":
                os.kill(int(folder.name), signal.SIGKILL)
                found.append(int(folder.name))
    return found


def _ended(output: str, witness: Path) -> Run:
    results = [line for line in output.splitlines() if line.startswith("{")]
    return Run(
        json.loads(results[-1]) if results else None,
        output,
        [json.loads(path.read_text()) for path in sorted(witness.glob("*.json"))],
        [line for path in sorted(witness.glob("*.log")) for line in path.read_text().splitlines()],
    )


def check_all_ours(checkpoint: Path) -> None:
    """Checks that every data file of a checkpoint is one of ours, with its footer."""
    names = data_files(checkpoint)
    assert names, f"'{checkpoint}' has no data files"
    for name in names:
        assert read_footer(checkpoint / name).rows is not None


def check_seen(run: Run, *roles: str) -> None:
    """Checks that the hook was on in a run, said so, and replaced objects of these roles."""
    for role in roles:
        assert run.replaced[role] > 0, f"no {role} was replaced: {run.replaced}"
    assert any("takes the place of FileSystemWriter" in line for line in run.log)
    assert any(" so far)" in line for line in run.log), "the counter at DEBUG"


def check_nothing_of_ours(run: Run) -> None:
    """Checks that a run without the hook loaded nothing of ours but the entry point's module."""
    assert any(one["has_dcp"] for one in run.processes), "DCP was not used at all"
    assert run.modules <= {"torch_dcpx"}, run.modules
    assert not run.log


def check_page(name: str, folder: Path) -> None:
    """Checks that the commands of a framework's page run, and that we write what they save."""
    runs = Framework(name, folder).run_page()
    assert sum((run.replaced for run in runs), Counter())["writer"] > 0


_TYPOS = """
import importlib, json, sys
names, told = vars(importlib.import_module(sys.argv[1])), []
for call in sys.argv[2:]:
    try:
        eval(call, names)
    except TypeError as error:
        told.append(str(error))
print(json.dumps({"told": told}))
"""


def check_typos(name: str, folder: Path, calls: dict[str, str]) -> None:
    """Checks that mistyped calls of the adapter of a framework say which keyword was meant."""
    framework = Framework(name, folder)
    python = [str(framework.bin / "python"), "-c", _TYPOS, f"torch_dcpx.integrations.{name}"]
    told = framework.run([*python, *calls], hook=False).result["told"]
    for call, text in zip(calls, told, strict=True):
        assert f"did you mean {calls[call]!r}?" in text, (call, text)
