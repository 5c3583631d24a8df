"""How slow the machine is: what tests take from it, and that it is measured once (machine.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import machine

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _nothing_is_cached() -> Iterator[None]:
    machine.slowness.cache_clear()
    yield
    machine.slowness.cache_clear()


# slowness, points of 20, stride of 12, seconds of 60, numbers of a sweep of 6 by the seed 7
TAKEN = [
    ("0.5", 40, 6, 60.0, [0, 1, 2, 3, 4, 5]),
    ("3", 7, 36, 180.0, [0, 1, 4]),
    ("8.25", 2, 99, 495.0, [0]),
    ("1000", 1, 12_000, 60_000.0, [0]),
]


def test_points_and_strides_follow_the_machine_and_deadlines_never_become_shorter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "measured", lambda: pytest.fail("it was measured"))
    for given, many, stride, seconds, tried in TAKEN:
        machine.slowness.cache_clear()
        monkeypatch.setenv(machine.SLOWNESS, given)
        assert (machine.points(20), machine.stride(12), machine.seconds(60), tried) == (
            many, stride, seconds, machine.spread(6, 7),
        )  # fmt: skip


def test_slowness_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("0", "nan", "inf", "fast", "", "1,5"):
        monkeypatch.setenv(machine.SLOWNESS, given)
        for ask in (machine.slowness, lambda: machine.points(3), lambda: machine.seconds(3)):
            with pytest.raises(ValueError, match=re.escape(f"DCPX_SLOWNESS={given!r}")):
                ask()


def test_it_is_measured_once_and_processes_inherit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[None] = []

    def slow() -> float:
        measured.append(None)
        return 4.324

    monkeypatch.setenv(machine.SLOWNESS, "what follows removes it, and the fixture puts it back")
    monkeypatch.delenv(machine.SLOWNESS)
    monkeypatch.setattr(machine, "measured", slow)
    assert (machine.slowness(), machine.seconds(10), machine.points(43)) == (4.32, 43.2, 10)
    code = (
        "from support import machine\n"
        "machine.measured = None  # a call of it fails\n"
        "print(machine.slowness())"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True, text=True, timeout=machine.seconds(600), check=True,
    )  # fmt: skip
    assert child.stdout == "4.32\n"
    assert len(measured) == 1


def test_program_prints_a_number_above_zero_whatever_the_environment_says(tmp_path: Path) -> None:
    """It is started before there is torch or pytest. Here it measures for less than its 5 s."""
    source = (TESTS / "support" / "machine.py").read_text()
    (tmp_path / "machine.py").write_text(source.replace("_MEASURED_S = 5.0", "_MEASURED_S = 0.2"))
    program = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / "machine.py")],
        env={machine.SLOWNESS: "77"},
        capture_output=True, text=True, timeout=machine.seconds(600), check=True,
    )  # fmt: skip
    assert re.fullmatch(r"\d+\.\d\d\n", program.stdout), program.stdout
    assert 0 < float(program.stdout) != 77


@pytest.mark.timeout(700)
def test_limit_of_a_test_is_that_of_an_idle_machine(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest
) -> None:
    assert request.node.get_closest_marker("timeout").args == (machine.seconds(700),)
    assert pytestconfig.option.timeout == machine.seconds(float(pytestconfig.getini("timeout")))
