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


# slowness, points of 20, of 1, stride of 12, seconds of 60
@pytest.mark.parametrize(
    ("given", "many", "one", "stride", "seconds"),
    [
        ("0.5", 40, 2, 6, 60.0),
        ("1", 20, 1, 12, 60.0),
        ("3", 7, 1, 36, 180.0),
        ("8.25", 2, 1, 99, 495.0),
        ("1000", 1, 1, 12_000, 60_000.0),
    ],
)
def test_points_and_strides_follow_the_machine_and_deadlines_never_become_shorter(
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    many: int,
    one: int,
    stride: int,
    seconds: float,
) -> None:
    monkeypatch.setenv(machine.SLOWNESS, given)
    assert (machine.points(20), machine.points(1)) == (many, one)
    assert (machine.stride(12), machine.stride(1)) == (stride, max(1, round(float(given))))
    assert machine.seconds(60) == seconds


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "fast", "", "1,5"])
def test_slowness_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(machine.SLOWNESS, given)
    for ask in (machine.slowness, lambda: machine.points(3), lambda: machine.seconds(3)):
        with pytest.raises(ValueError, match=re.escape(f"DCPX_SLOWNESS={given!r}: expected")):
            ask()


def test_what_the_environment_says_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.SLOWNESS, "2.5")
    monkeypatch.setattr(machine, "measured", lambda: pytest.fail("it was measured"))
    assert machine.slowness() == 2.5


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


def test_program_prints_a_number_above_zero_whatever_the_environment_says() -> None:
    """Some 5 s: it measures this machine, and is started before there is torch or pytest."""
    program = subprocess.run(
        [sys.executable, "-I", "-S", str(TESTS / "support" / "machine.py")],
        env={machine.SLOWNESS: "77"},
        capture_output=True, text=True, timeout=machine.seconds(600), check=True,
    )  # fmt: skip
    assert re.fullmatch(r"\d+\.\d\d\n", program.stdout), program.stdout
    assert 0 < float(program.stdout) != 77


@pytest.mark.parametrize(
    ("given", "seed", "tried"),
    [("0.5", 7, [0, 1, 2, 3, 4, 5]), ("3", 7, [0, 1, 4]), ("3", 9, [0, 3]), ("8", 5, [0, 5])],
)
def test_numbers_of_a_sweep_begin_with_0_and_are_all_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch, given: str, seed: int, tried: list[int]
) -> None:
    monkeypatch.setenv(machine.SLOWNESS, given)
    assert machine.spread(6, seed) == tried


@pytest.mark.timeout(700)
def test_limit_of_a_test_is_that_of_an_idle_machine(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest
) -> None:
    assert request.node.get_closest_marker("timeout").args == (machine.seconds(700),)
    assert pytestconfig.option.timeout == machine.seconds(float(pytestconfig.getini("timeout")))
