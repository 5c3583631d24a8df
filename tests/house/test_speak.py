"""What `make` runs says what is under way (requirements/speak.py), and is otherwise as without it.

No command here ends by itself: each waits for a line that the test writes once it has seen enough.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from conftest import ROOT
from support.machine import seconds
from support.silence import listen, output, read_all

pytestmark = pytest.mark.slow  # each starts several processes

SPEAK = [sys.executable, "-S", str(ROOT / "requirements" / "speak.py"), "--after", "0.1"]
QUIET = [*SPEAK[:-1], "3600"]
terminal_or_pipe = pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])


def read_until(reading: int, pattern: str, times: int = 1, within_s: float = seconds(120)) -> str:
    """Returns what was read until the pattern was there so often."""
    text, give_up_at = "", time.monotonic() + within_s
    while len(re.findall(pattern, text)) < times:
        left_s = give_up_at - time.monotonic()
        assert select.select([reading], [], [], max(0, left_s))[0], f"no {pattern}: {text[-500:]}"
        data = os.read(reading, 1 << 16)
        assert data, f"the end, and no {pattern}: {text[-500:]}"
        text += data.decode()
    return text


def rest(reading: int) -> str:
    """Returns what is still to come, to the end."""
    return b"".join(read_all(reading)).decode()


class Waiting:
    """A command under speak.py that waits for a line of its standard input."""

    def __init__(self, command: Sequence[str], is_terminal: bool = False, **more: object) -> None:
        with output(is_terminal) as (reading, given):
            self.reading = os.dup(reading)
            self.child = subprocess.Popen(
                [*SPEAK, *command], stdin=subprocess.PIPE, stdout=given, stderr=given, **more
            )  # type: ignore[call-overload]
            os.close(given)

    def until(self, pattern: str, times: int = 1) -> str:
        return read_until(self.reading, pattern, times)

    def end(self) -> tuple[int, str]:
        """Returns the exit status, and what was printed to the end."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        said = rest(self.reading)
        return self.child.wait(seconds(60)), said

    def close(self) -> None:
        os.close(self.reading)
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def started() -> Iterator[list[Waiting]]:
    waiting: list[Waiting] = []
    yield waiting
    for one in waiting:
        one.close()


# ---- What it says -------------------------------------------------------------------------------


@terminal_or_pipe
def test_silence_is_broken_again_and_again_and_never_after_the_end(
    started: list[Waiting], is_terminal: bool
) -> None:
    started.append(Waiting(["sh", "-c", "printf begun; cat; echo ended"], is_terminal))
    said = started[0].until(r"-- \d+ s, waiting: cat \(\d+ s\)\n", times=3)
    assert said.startswith("begun\n-- "), "on a line of its own"
    status, said = started[0].end()
    assert (status, said.splitlines()[-1]) == (0, "ended")


# ---- What it leaves as it was -------------------------------------------------------------------

PRINTS_BYTES = (
    "import os, random, sys; data = random.Random(7).randbytes(3_000_001)\n"
    "for at in range(0, len(data), 1000): os.write(1 + at // 1000 % 2, data[at : at + 1000])"
)


@terminal_or_pipe
def test_every_byte_arrives_in_order(is_terminal: bool) -> None:
    command = [sys.executable, "-S", "-c", PRINTS_BYTES]
    sums = []
    for prefix in ([], QUIET):
        status, heard = listen([*prefix, *command], is_terminal)
        data = b"".join(one.data for one in heard)
        sums.append((status, len(data), hashlib.sha256(data).hexdigest()))
    assert sums[0] == sums[1]
    assert sums[0][:2] == (0, 3_000_001)


@pytest.mark.parametrize("ends", ["exit 0", "exit 3", "kill -TERM $$", "kill -KILL $$",
                                  "ulimit -c 0; kill -SEGV $$"])  # fmt: skip
def test_end_of_the_command_is_its_end(ends: str) -> None:
    plain = subprocess.run(["sh", "-c", ends]).returncode
    assert subprocess.run([*QUIET, "sh", "-c", ends]).returncode == plain


COUNTS = """
import signal, sys
seen = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: (seen.append(int(number)), print("got", flush=True)))
def end(*_):
    print("seen", seen, flush=True)
    sys.exit(9)
signal.signal(signal.SIGUSR1, end)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_it_reaches_the_command_once(number: signal.Signals) -> None:
    with subprocess.Popen([*QUIET, sys.executable, "-c", COUNTS], stdout=subprocess.PIPE) as speak:
        assert speak.stdout is not None
        assert speak.stdout.readline() == b"ready\n"
        speak.send_signal(number)
        assert speak.stdout.readline() == b"got\n"
        speak.send_signal(signal.SIGUSR1)
        assert speak.stdout.read().decode() == f"seen [{int(number)}]\n"
    assert speak.returncode == 9
