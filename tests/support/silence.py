"""How long a command is silent: its output with time stamps, on a pipe or on a terminal.

    python tests/support/silence.py [--terminal] [--stamped FILE] COMMAND [ARGUMENT ...]

Passes the output on, and at the end prints the longest silence and what it lay between. Exits as
the command does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heard:
    """One piece of output, and when it came, in seconds from the start."""

    at_s: float
    data: bytes


@contextlib.contextmanager
def output(is_terminal: bool) -> Iterator[tuple[int, int]]:
    """Two ends of a pipe or a terminal: to read from, to give to a command."""
    reading, given = os.openpty() if is_terminal else os.pipe()
    if is_terminal:
        tty.setraw(given, termios.TCSANOW)
    try:
        yield reading, given
    finally:
        os.close(reading)


def read_all(reading: int) -> Iterator[bytes]:
    """Yields what comes until nobody has the other end open."""
    while True:
        try:
            data = os.read(reading, 1 << 16)
        except OSError:  # EIO: the end of a terminal
            return
        if not data:
            return
        yield data


def listen(
    command: Sequence[str], is_terminal: bool, told: Callable[[Heard], None] = lambda _: None
) -> tuple[int, list[Heard]]:
    """Returns the command's exit status, as of subprocess, and what it printed; each piece is told
    as it comes."""
    began, heard = time.monotonic(), []
    with output(is_terminal) as (reading, given):
        with subprocess.Popen(command, stdout=given, stderr=given) as child:
            os.close(given)
            for data in read_all(reading):
                heard.append(Heard(time.monotonic() - began, data))
                told(heard[-1])
        return child.returncode, [*heard, Heard(time.monotonic() - began, b"")]


def longest_silence(heard: Sequence[Heard]) -> tuple[float, bytes, bytes]:
    """Returns the longest time without a byte, in seconds, and what came before and after it."""
    pieces = [Heard(0.0, b""), *heard]
    longest = max(range(1, len(pieces)), key=lambda i: pieces[i].at_s - pieces[i - 1].at_s)
    before, after = pieces[longest - 1], pieces[longest]
    return after.at_s - before.at_s, before.data, after.data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--terminal", action="store_true", help="a terminal in place of a pipe")
    parser.add_argument("--stamped", type=Path, help="a file for the output with time stamps")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with open(options.stamped or os.devnull, "w", buffering=1) as stamped:

        def told(one: Heard) -> None:
            os.write(1, one.data)
            stamped.write(f"{one.at_s:9.2f} {one.data.decode(errors='replace')!r}\n")

        status, heard = listen(options.command, options.terminal, told)
    silent_s, before, after = longest_silence(heard)
    print(f"{heard[-1].at_s:.1f} s in all, the longest silence {silent_s:.1f} s")
    print(f"  before it: {before.decode(errors='replace')[-200:]!r}")
    print(f"  after it:  {after.decode(errors='replace')[:200]!r}")
    sys.exit(status)


if __name__ == "__main__":
    main()
