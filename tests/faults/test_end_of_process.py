"""What becomes of a save in the background when its process ends."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.warm import warm_parent
from torch.distributed.checkpoint import FileSystemReader

from torch_dcpx import save

# The save is held at its first byte until the main thread is about to end.
SCRIPT = """
import logging, os, signal, sys, threading
import torch
from torch_dcpx import StorageError, WriteOptions, async_save, drain_on_sigterm

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
path, ending = sys.argv[1:3]
ends = threading.Event()

def hold(done, total):
    if ending == "late":
        threading.Event().wait()
    assert ends.wait(600)
    if ending == "failing":
        raise StorageError("no room")

def on_signal(number, frame):
    print("handler", flush=True)
    os._exit(5)

if ending == "chained":
    signal.signal(signal.SIGTERM, on_signal)
if ending == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if ending in ("signal", "chained", "ignored"):
    drain_on_sigterm()
if ending == "put_back":
    drain_on_sigterm()()
async_save({"w": torch.full((1000,), 2.0)}, path, options=WriteOptions(progress=hold))
if ending not in ("late", "put_back"):
    threading.Timer(0.3, ends.set).start()
if ending == "sys.exit":
    sys.exit(3)
if ending == "unhandled":
    raise KeyError("unhandled")
if ending == "ignored":
    os.kill(os.getpid(), signal.SIGTERM)
if ending in ("signal", "chained", "put_back"):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(600)
"""

# Held until the interpreter ends, the first callback begins another save.
SAVE_IN_CALLBACK = """
import atexit, sys, threading, time
import torch
import torch_dcpx as dcpx

path, how = sys.argv[1:3]
ends = threading.Event()
seen = []

def save_again(_):
    assert ends.wait(600)
    seen.append(1)
    if len(seen) == 1:
        slow = dcpx.WriteOptions(progress=lambda done, total: time.sleep(0.3))
        dcpx.async_save({"w": torch.full((1000,), 2.0)}, path, no_dist=True, options=slow)

remove = dcpx.on_event(save_again) if how == "event" else None
handle = dcpx.async_save({"w": torch.ones(1000)}, path, no_dist=True)
if remove is None:
    handle.add_done_callback(save_again)
atexit.register(ends.set)  # called before the library's
handle.staged.result()
"""


def run(path: Path, ending: str, script: str = SCRIPT, **environment: str) -> tuple[int, str]:
    command = ["-c", script, str(path), ending]
    result = warm_parent().run(command, env={**os.environ, **environment})
    return result.returncode, result.stdout + result.stderr


def value_in(path: Path) -> float:
    target = {"w": torch.zeros(1000)}
    dcp.load(target, storage_reader=FileSystemReader(path), no_dist=True)
    (value,) = set(target["w"].tolist())
    return float(value)


CODES = {"normal": 0, "chained": 5, "sys.exit": 3, "unhandled": 1, "signal": -signal.SIGTERM,
         "ignored": 0}  # fmt: skip
FAST = ("normal", "chained", "ignored")


@pytest.mark.parametrize(
    "ending", [pytest.param(e, marks=[pytest.mark.slow] * (e not in FAST)) for e in CODES]
)
def test_end_of_a_process_waits_for_its_saves(tmp_path: Path, ending: str) -> None:
    save({"w": torch.ones(1000)}, tmp_path)
    returncode, output = run(tmp_path, ending)
    assert returncode == CODES[ending], output
    assert value_in(tmp_path) == 2.0
    assert ("handler" in output) == (ending == "chained")


@pytest.mark.parametrize("how", ["event", "done"])
def test_end_of_a_process_waits_for_a_save_that_a_callback_begins(tmp_path: Path, how: str) -> None:
    code, output = run(tmp_path, how, SAVE_IN_CALLBACK)
    assert code == 0, output
    assert value_in(tmp_path) == 2.0


@pytest.mark.slow
def test_handler_that_is_put_back_no_longer_waits(tmp_path: Path) -> None:
    save({"w": torch.ones(1000)}, tmp_path)
    returncode, output = run(tmp_path, "put_back")
    assert returncode == -signal.SIGTERM, output
    assert value_in(tmp_path) == 1.0


@pytest.mark.slow
def test_save_that_takes_too_long_at_the_end_leaves_the_previous_checkpoint(
    tmp_path: Path,
) -> None:
    save({"w": torch.ones(1000)}, tmp_path)
    returncode, output = run(tmp_path, "late", DCPX_EXIT_TIMEOUT_S="0.2")
    assert returncode == 0, output
    assert re.search(rf"ERROR .*0\.2 s \(DCPX_EXIT_TIMEOUT_S\) while .*{tmp_path}", output), output
    assert value_in(tmp_path) == 1.0
    save({"w": torch.full((1000,), 3.0)}, tmp_path)
    assert value_in(tmp_path) == 3.0


@pytest.mark.slow
def test_bad_exit_timeout_is_said_and_the_default_taken(tmp_path: Path) -> None:
    returncode, output = run(tmp_path, "normal", DCPX_EXIT_TIMEOUT_S="soon")
    assert returncode == 0, output
    assert re.search("ERROR DCPX_EXIT_TIMEOUT_S .*'soon'", output), output
    assert value_in(tmp_path) == 2.0


def test_failed_save_that_nobody_asked_about_is_said_at_the_end(tmp_path: Path) -> None:
    save({"w": torch.ones(1000)}, tmp_path)
    returncode, output = run(tmp_path, "failing")
    assert returncode == 0, output
    assert f"ERROR the save to '{tmp_path}' failed: no room" in output
    assert value_in(tmp_path) == 1.0
