"""Processes that are forked with torch are to their tests what fresh ones are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine import seconds
from support.warm import warm_parent

BODY = """
import atexit, os, signal, sys
print(__name__, sys.argv, os.environ.get("OF_THE_TEST"), os.getcwd(), sys.path[0])
atexit.register(print, "at exit", flush=True)
"""
ENDS = {
    "": 0,
    "sys.exit(3)": 3,
    "raise KeyError('unhandled')": 1,
    "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
}


@pytest.mark.parametrize("end", ENDS)
def test_warm_process_says_and_ends_as_a_fresh_one(tmp_path: Path, end: str) -> None:
    env = {**os.environ, "OF_THE_TEST": "here"}
    command = ["-c", BODY + end, "x", "y"]
    if end == "":
        command[:2] = [str(tmp_path / "script.py")]
        (tmp_path / "script.py").write_text(BODY + end)
    fresh = subprocess.run(
        [sys.executable, *command],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=seconds(120), check=False,
    )  # fmt: skip
    warm = warm_parent().run(command, env=env, cwd=tmp_path)
    assert (warm.returncode, warm.stdout) == (fresh.returncode, fresh.stdout)
    assert warm.returncode == ENDS[end]
    assert warm.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_warm_process_that_does_not_end_is_killed() -> None:
    read_end, write_end = os.pipe()
    with open(read_end) as said, open(write_end, "w") as out:
        code = "import signal; print('is there', flush=True); signal.pause()"
        process = warm_parent().start(["-c", code], out, out, env=os.environ)
        out.close()
        assert said.readline() == "is there\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(seconds(60)) == -signal.SIGKILL
        assert said.readline() == "", "nobody has its output open"
    assert warm_parent().run(["-c", "print('next')"], env=os.environ).stdout == "next\n"
