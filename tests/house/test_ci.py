"""How the tests are run: each of them once by `.ci/run`, wherever SIGINT is ignored."""

from __future__ import annotations

import collections
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, RunPython
from support.warm import warm_parent

# Given to pytest by `-p`: prints the tests of a run, and whether conftest.py has set each aside.
LISTS_TESTS = """
import json
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    def is_set_aside(item):
        reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skip")]
        return any("runs in `make test-all`" in reason for reason in reasons)

    found = [(item.nodeid, is_set_aside(item)) for item in session.items]
    print("TESTS", json.dumps(found), flush=True)
"""


def pytest_arguments(target: str, environment: str, pytest_args: str) -> list[str]:
    """Returns what `make TARGET` gives to pytest, where `.ci/run` calls it so."""
    command = ["make", "-n", target, "VENV=", f"PYTHON={sys.executable}"]
    made = subprocess.run(
        [*command, f"PYTEST_ARGS={pytest_args}"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    (line,) = [line for line in made.stdout.splitlines() if " -m pytest" in line]
    assert "DCPX_STRICT=1" in f"{environment} {line}", "a skip is a failure"
    return shlex.split(line.split(" -m pytest", 1)[1])


def collected(folder: Path, arguments: list[str], hash_seed: str) -> list[tuple[str, bool]]:
    """Returns the tests that pytest would run with these arguments, and which are set aside."""
    (folder / "lists_tests.py").write_text(LISTS_TESTS)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-n0", "--collect-only", "-q",
         "-p", "lists_tests", "-p", "no:cacheprovider"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
        capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("TESTS ")]
    assert len(lines) == 1, done.stdout + done.stderr
    (line,) = lines
    return [(name, is_set_aside) for name, is_set_aside in json.loads(line[6:])]


@pytest.mark.slow  # it collects all tests twice
@pytest.mark.timeout(1800)
def test_each_test_runs_once_in_ci_and_has_one_name_in_all_processes(tmp_path: Path) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    seed = (ROOT / ".ci" / "seed").read_text().strip()
    (seeds,) = re.findall(r'^SEEDS="(.*)"$', script, re.MULTILINE)
    calls = re.findall(r'^ *(\S+=\S+ )?make (test\S*) PYTEST_ARGS="(.*)"$', script, re.MULTILINE)
    assert [target for _, target, _ in calls] == ["test", "test-all"]
    assert len(re.findall(r"^ *(?:\S+=\S+ )?make test", script, re.MULTILINE)) == len(calls)
    runs, names = [], []
    for environment, target, pytest_args in calls:
        given = pytest_args.replace("$SEEDS", seeds).replace("$(cat .ci/seed)", seed)
        arguments = pytest_arguments(target, environment, given)
        tests = collected(tmp_path, arguments, hash_seed=str(len(runs)))
        runs += [name for name, is_set_aside in tests if not is_set_aside]
        names.append({name for name, _ in tests})
    assert names[1] < names[0], "pytest-xdist wants one name of a test in each process"
    assert names[0] == set(runs)
    assert [name for name, times in collections.Counter(runs).items() if times != 1] == []
    folders = {Path(name).parts[1] for name in names[0]}
    assert "house" in folders
    assert "frameworks" not in folders, "they run in environments of `make test-frameworks`"
    assert "pages" not in folders, "they run in a browser, by `make test-pages`"
    addresses = [name for name in names[0] if re.search(r" at 0x[0-9a-f]+", name)]
    assert addresses == [], "no sample is drawn again by its seed"


HANGS = """
import threading
import pytest

@pytest.mark.timeout(1)
def test_that_hangs():
    threading.Event().wait()

def test_that_passes():
    pass
"""


@pytest.mark.slow
def test_timeout_prints_every_stack_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n1", "-p", "conftest", "-p", "no:cacheprovider",
         "-c", str(ROOT / "pyproject.toml"), f"--basetemp={tmp_path / 'base'}", str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "threading.Event().wait()" in done.stderr


# ---- SIGINT -------------------------------------------------------------------------------------

IS_DEFAULT = "import signal; assert signal.getsignal(2) is signal.default_int_handler"


def test_sigint_interrupts_tests_and_their_children(run_python: RunPython) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run_python(IS_DEFAULT)
    assert warm_parent().run(["-c", IS_DEFAULT], env=os.environ).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_sigint_that_a_shell_ignores_interrupts_tests_all_the_same(
    tmp_path: Path, processes: str
) -> None:
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh",
         sys.executable, "-m", "pytest", "-q", f"-n{processes}", "-p", "no:cacheprovider",
         f"--basetemp={tmp_path / 'base'}",
         f"{__file__}::test_sigint_interrupts_tests_and_their_children"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
