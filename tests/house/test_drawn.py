"""Which tests `.ci/run` takes (support/drawn.py): the core, of the others what time allows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from support import drawn
from support.machine import seconds

SUITE = """
import time

import pytest

@pytest.mark.slow
@pytest.mark.parametrize("n", range(6))
def test_core(n):
    assert n != {failing_core}

@pytest.mark.slow
@pytest.mark.parametrize("n", range(20))
def test_other(n):
    time.sleep(max(0, {waiting_until} - time.time() + 0.1))
    assert n != {failing_other}
"""


class Suite:
    """Six tests of a core and twenty others, run by pytest in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.core = [f"test_suite.py::test_core[{n}]" for n in range(6)]
        self.others = [f"test_suite.py::test_other[{n}]" for n in range(20)]
        (folder / "core.txt").write_text("# the core\n\n" + "\n".join(self.core) + "\n")
        (folder / "durations.json").write_text(json.dumps({"seconds": {self.core[3]: 9.0}}))
        places = f"from pathlib import Path\ndrawn.TESTS = Path({str(folder)!r})\n"
        (folder / "places.py").write_text(f"from support import drawn\n{places}")
        (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")

    def run(
        self, *options: str, processes: int = 2, **given: float
    ) -> subprocess.CompletedProcess[str]:
        numbers = {"failing_core": -1, "failing_other": -1, "waiting_until": 0.0}
        (self.folder / "test_suite.py").write_text(SUITE.format(**numbers | given))
        path = os.pathsep.join([str(self.folder), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "places", "-p", "support.drawn",
             "-p", "no:cacheprovider", "-p", "no:warnings", "-p", "xdist",
             f"-n{processes}", "--dist", "load", "--maxschedchunk", "1", *options],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True, text=True,
        )  # fmt: skip

    def not_run(self) -> list[str]:
        return (self.folder / drawn.NOT_RUN).read_text().split()


def ran(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = [line for line in done.stdout.splitlines() if "%]" in line]
    found = (re.search(r"test_suite\.py::\S+\]", line) for line in lines)
    return [name[0] for name in found if name is not None]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_what_did_not_begin_in_the_time_is_named_and_no_failure(suite: Suite) -> None:
    done = suite.run("--draw=abc", f"--until={time.time() - 60}", failing_other=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert suite.not_run() == sorted(suite.others)
    assert "0 of 20 tests ran, drawn by abc; 20 did not begin in the time" in done.stdout
    assert "    20 of test_suite.py" in done.stdout
    assert re.fullmatch(r"=+ .* in .* =+", done.stdout.splitlines()[-1])


def test_the_core_runs_whole_and_alone_the_longest_first(suite: Suite) -> None:
    done = suite.run("--core", processes=0, failing_core=2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert sorted(ran(done)) == suite.core and ran(done)[0] == suite.core[3]
    assert re.fullmatch(r"=+ 1 failed, 5 passed in .* =+", done.stdout.splitlines()[-1])


def test_a_test_that_has_begun_ends_and_no_other_begins(suite: Suite) -> None:
    until = time.time() + seconds(3)
    done = suite.run("--draw=abc", f"--until={until}", waiting_until=until, processes=0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(suite.not_run()) == 19
    assert re.fullmatch(r"=+ 1 passed, .* =+", done.stdout.splitlines()[-1])


def test_tests_begin_in_the_order_that_is_drawn_and_what_failed_fails_the_run(suite: Suite) -> None:
    orders = {text: drawn.order(suite.others, text) for text in ("abc", "def")}
    assert orders["abc"] != orders["def"]
    for text, processes in (("abc", 0), ("def", 2)):
        later = f"--until={time.time() + 36_000}"
        done = suite.run(f"--draw={text}", later, failing_other=3, processes=processes)
        assert done.returncode == 1, done.stdout + done.stderr
        assert sorted(ran(done)) == sorted(suite.others) and suite.not_run() == []
        assert processes or ran(done) == orders[text]
        assert re.fullmatch(r"=+ 1 failed, 19 passed.* in .* =+", done.stdout.splitlines()[-1])
        said = done.stdout.partition("20 of 20 tests ran")[2]
        assert suite.others[3] in said.splitlines() and "assert 3 != 3" in said, done.stdout


def test_shards_take_each_test_once(suite: Suite) -> None:
    names = [*suite.core, *suite.others]
    parts = [drawn.shard(names, set(names), k, 3) for k in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert set(ran(suite.run("--shard=1/3", processes=0)))
    done = suite.run("--shard=4/3", processes=0)
    assert done.returncode == 4 and "'4/3' is no part K/N" in done.stderr


# ---- tests/core.txt and tests/durations.json ----------------------------------------------------

LANDINGS, WANTED = 10, 0.95
PROCESSES = 3  # on two cores


def begun(measured: dict[str, float], text: str, time_s: float) -> set[str]:
    """Returns the tests that begin before the time is used."""
    free_at = [0.0] * PROCESSES
    taken: set[str] = set()
    for name in drawn.order(list(measured), text):
        first = free_at.index(min(free_at))
        if free_at[first] > time_s:
            break
        taken.add(name)
        free_at[first] += measured[name]
    return taken


def test_each_slow_test_is_drawn_within_ten_landings_on_a_slow_machine() -> None:
    found = json.loads((ROOT / "tests" / "durations.json").read_text())
    measured = dict(found["seconds"])
    minutes = re.search(r"MINUTES=\$\{CI_MINUTES:-(\d+)\}", (ROOT / ".ci" / "run").read_text())
    time_s = int(minutes[1]) * 60 - found["before_s"]
    others = measured.keys() - set(drawn.core())
    # Of all tests, as each is as likely as any other to be among the first: over 300 draws the mean
    # is within a hundredth, while the least of 800 is a matter of luck.
    draws = [begun(measured, str(n), time_s) for n in range(300)]
    share = sum(map(len, draws)) / len(draws) / len(others)
    print(f"{len(others)} tests, {share:.3f} of them a landing")
    assert 1 - (1 - share) ** LANDINGS >= WANTED, share
