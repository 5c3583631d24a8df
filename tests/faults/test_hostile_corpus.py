"""The hostile corpus, driven under an audit hook: nothing executed, escaped, hung, or believed.

`hostile/driver` makes and judges it. A sample of its cases is tried, another one each run;
DCPX_HOSTILE_STRIDE=1 tries all of them (twenty minutes).
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hostile.corpus import cases
from support.machine import seconds, stride

TESTS = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join([str(TESTS.parent), str(TESTS)])
STRIDE = int(os.environ.get("DCPX_HOSTILE_STRIDE") or stride(32))
TIMEOUT_S = seconds(7200 if min(32, stride(32)) > STRIDE else 1150)


def drive(scratch: Path, stride: int, shift: int, change: str = "") -> tuple[int, str]:
    """Runs the driver in a fresh process, behind a line that changes it; returns status, output."""
    args = str(scratch), stride, shift
    code = f"import sys\nfrom hostile import driver\n{change}\nsys.exit(driver.main(*{args}))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr[-3000:]


@pytest.mark.slow  # as is what it is for
def test_names_of_the_corpus_are_its_own() -> None:
    names = [(case.kind, case.name) for case in cases()]
    assert len(names) > 1000
    assert len(names) == len(set(names))


def test_what_the_corpus_names_of_this_package_is_there() -> None:
    """Else a gadget attacks a module that has moved, and passes because nothing is there."""
    text = "".join(path.read_text() for path in (TESTS / "hostile").glob("*.py"))
    pairs = set(re.findall(r'"(torch_dcpx\.[\w.]+)", "([\w.]+)"', text))
    assert len(pairs) >= 2
    for module, name in pairs:
        assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module)))
    for name in set(re.findall(r'"(torch_dcpx(?:\.\w+){2,})"', text)) - {pair[0] for pair in pairs}:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_hostile_checkpoints_execute_nothing_reach_nothing_and_end(
    tmp_path: Path, seed: int
) -> None:
    status, output = drive(tmp_path, STRIDE, seed % STRIDE)
    print(output)
    assert status == 0, output


@pytest.mark.slow
def test_driver_sees_a_reader_that_trusts_what_it_reads(tmp_path: Path) -> None:
    """Or its zeros would say nothing: what `.metadata` names runs where it is trusted."""
    change = (
        "from torch_dcpx import DcpxReader, ReadOptions\n"
        "trusting = lambda path: DcpxReader(path, options=ReadOptions(trusted=True))\n"
        "own = list(driver.cases())\n"
        "driver.DcpxReader = trusting\n"
        "driver.cases = lambda: [c for c in own if c.kind == 'gadget in .metadata' and "
        "c.name.startswith(('os.system', 'posix.system', 'os.mkdir', 'builtins.eval'))]\n"
    )
    status, output = drive(tmp_path, 1, 0, change)
    print(output)
    assert status == 1, output
    assert '"executed"' in output
    assert '"escaped"' in output
