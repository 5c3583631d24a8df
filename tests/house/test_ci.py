"""How the tests are run: what `.ci/run` takes in its time, wherever SIGINT is ignored."""

from __future__ import annotations

import collections
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RunPython
from support.drawn import core, durations
from support.machine import seconds
from support.warm import warm_parent

# ---- .ci/run ------------------------------------------------------------------------------------

# A make that notes its calls as JSON, and fails where a word of its call is FAILING.
MAKE = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    print(json.dumps([sys.argv[1:], os.environ.get("DCPX_STRICT", "")]), file=file)
sys.exit(os.environ["FAILING"] in " ".join(sys.argv[1:]).replace("=", " ").split())
"""
CALLS = ["lint", "test-all", "test", "test-all"]


def ci_run(folder: Path, failing: str = "", **given: str) -> tuple[Any, list[Any]]:
    """Runs `.ci/run` on a make that only notes its calls; returns how it ended, and them."""
    shutil.copytree(ROOT / ".ci", folder / ".ci", dirs_exist_ok=True)
    make, calls = folder / "bin" / "make", folder / "calls"
    make.parent.mkdir(exist_ok=True)
    make.write_text(MAKE)
    make.chmod(0o755)
    calls.write_text("")
    environment = {k: v for k, v in os.environ.items() if k not in ("CI_MINUTES", "DURATIONS")}
    environment |= {"PATH": f"{make.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    environment |= {"FAILING": failing, "DCPX_STRICT": "", "DCPX_SLOWNESS": "1.25"}
    done = subprocess.run(
        ["bash", ".ci/run"], cwd=folder, env={**environment, **given},
        capture_output=True, text=True, timeout=seconds(120),
    )  # fmt: skip
    return done, [json.loads(line) for line in calls.read_text().splitlines()]


def limit(arguments: str) -> float:
    """Returns until when tests may begin, in minutes from now."""
    (found,) = re.findall(r"--until=(\d+)", arguments)
    return (float(found) - time.time()) / 60


@pytest.mark.root
@pytest.mark.parametrize(("given", "until"), [({}, 40), ({"CI_MINUTES": "15"}, 15)])
def test_ci_takes_lint_the_tests_and_slow_ones_until_its_minutes_are_used(
    tmp_path: Path, given: dict[str, str], until: int
) -> None:
    done, calls = ci_run(tmp_path, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [arguments[0] for arguments, _ in calls] == CALLS
    assert done.stdout.startswith(f"== {until} minutes, measuring how slow this machine is, at ")
    assert "its slowness is 1.25, at 0:" in done.stdout
    (_, (core, _), (fast, _), (others, _)) = calls
    assert "--core" in core[1] and "--until" not in core[1]
    assert limit(fast[1]) == pytest.approx(75, abs=seconds(1))
    assert limit(others[1]) == pytest.approx(until, abs=seconds(1))


@pytest.mark.parametrize("minutes", ["", "x", "0", "1000"])
def test_ci_refuses_minutes_that_are_none(tmp_path: Path, minutes: str) -> None:
    done, calls = ci_run(tmp_path, CI_MINUTES=minutes)
    if minutes == "":  # as unset
        assert done.returncode == 0
        return
    assert done.returncode == 2 and calls == []
    assert f"CI_MINUTES={minutes}: expected minutes, 1 to 999" in done.stderr


FAILING = ["lint", "--core", "test", "--draw"]


@pytest.mark.root
@pytest.mark.parametrize(("number", "failing"), list(enumerate(FAILING)))
def test_ci_fails_where_one_of_its_calls_does(tmp_path: Path, number: int, failing: str) -> None:
    done, calls = ci_run(tmp_path, failing)
    assert done.returncode != 0
    assert [arguments[0] for arguments, _ in calls] == CALLS[: number + 1]


def test_ci_says_what_needs_root_and_takes_the_rest(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    somebody = tmp_path / "bin" / "id"
    somebody.write_text("#!/bin/sh\necho 1000\n")
    somebody.chmod(0o755)
    done, calls = ci_run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [arguments[0] for arguments, _ in calls] == ["lint", "test"]
    said = "all slow tests: they need root and loop devices\n"
    assert said in done.stdout
    assert (tmp_path / "build" / "ci" / "not_run.txt").read_text() == said


# ---- Each test is in it -------------------------------------------------------------------------

# Given to pytest by `-p`: prints the tests of a run.
LISTS_TESTS = """
import json
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    print("TESTS", json.dumps([item.nodeid for item in session.items]), flush=True)
"""


def pytest_arguments(call: list[str], strict: str) -> list[str]:
    """Returns what a call of make gives to pytest."""
    made = subprocess.run(
        ["make", "-n", "VENV=", f"PYTHON={sys.executable}", *call],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds(60), check=True,
    )  # fmt: skip
    (line,) = [line for line in made.stdout.splitlines() if " -m pytest" in line]
    assert "DCPX_STRICT=1" in f"DCPX_STRICT={strict} {line}", "a skip is a failure"
    return shlex.split(line.split(" -m pytest", 1)[1])


def collected(folder: Path, arguments: list[str], hash_seed: str) -> list[str]:
    """Returns the tests that pytest would run with these arguments."""
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
    found: list[str] = json.loads(lines[0].removeprefix("TESTS "))
    return found


@pytest.mark.slow  # it collects all tests twice
@pytest.mark.root
@pytest.mark.timeout(1800)
def test_each_test_is_in_ci_once_and_has_one_name_in_all_processes(tmp_path: Path) -> None:
    _, (_, *calls) = ci_run(tmp_path)
    first, fast, others, every = (
        collected(tmp_path, pytest_arguments(call, strict), hash_seed=str(number))
        for number, (call, strict) in enumerate([*calls, (["test-all"], "1")])
    )
    assert set(first) == set(core())
    runs = collections.Counter([*first, *fast, *others])
    assert [name for name, times in runs.items() if times != 1] == []
    assert runs.keys() == set(every), "pytest-xdist wants one name of a test in each process"
    unlike = durations().keys() ^ {*first, *others}  # gone, or not measured
    assert len(unlike) < len(others) / 10, "`make durations` measures them anew"
    folders = {Path(name).parts[1] for name in every}
    assert "house" in folders
    assert "frameworks" not in folders, "they run in environments of `make test-frameworks`"
    assert "pages" not in folders, "they run in a browser, by `make test-pages`"
    addresses = [name for name in every if re.search(r" at 0x[0-9a-f]+", name)]
    assert addresses == [], "no sample is drawn again by its seed"


GIVEN = ["PYTEST_ARGS=--draw=1 -m 'slow or root' x=3", "SHARD=1/2", "DCPX_SEED=3"]


def test_make_in_a_test_has_nothing_of_the_make_that_runs_the_tests(tmp_path: Path) -> None:
    look = "import conftest, os; print({k: v for k, v in os.environ.items() if k in given})"
    names = [text.partition("=")[0] for text in GIVEN]
    (tmp_path / "look.py").write_text(f"given = {[*names, 'MAKEFLAGS', 'MAKELEVEL']}\n{look}\n")
    (tmp_path / "Makefile").write_text(f"all:\n\t@{sys.executable} look.py\n")
    done = subprocess.run(
        ["make", *GIVEN], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "{'DCPX_SEED': '3'}\n"


# ---- SIGINT -------------------------------------------------------------------------------------

IS_DEFAULT = "import signal; assert signal.getsignal(2) is signal.default_int_handler"


def test_sigint_interrupts_tests_and_their_children(run_python: RunPython) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run_python(IS_DEFAULT)
    assert warm_parent().run(["-c", IS_DEFAULT], env=os.environ).returncode == 0
