"""Daemon threads that are in C++ when the interpreter ends: the exit code stays Python's."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import RunPython
from support.call_shim import compiled, preloaded
from support.machine import EVERY_POINT
from support.warm import warm_parent
from torch.distributed.checkpoint import FileSystemReader

import torch_dcpx
from torch_dcpx import save, verify

# From the last hook of its end on, the main thread keeps the GIL; it gives it away once more when
# it finalizes. So a thread that asks for it meanwhile begins to before, and is answered after the
# interpreter has begun to finalize. Without torch.
JOBS = """
import ctypes

def new_job(path, fd, name):
    from torch_dcpx import _C
    job = _C.WriteJob(dir_fd=fd, dir_path=path, workers=2, segment_bytes=256 << 10,
                      use_direct=False, is_durable=False)
    job.add_file([name], bytes(16), 0)
    return job

def write(job, data, columns, progress):
    sizes, strides = (1 << 20, columns), (1, 0)
    row = (0, 0, 0, ctypes.addressof(data), columns << 20, sizes, strides, False,
           "w", sizes, (0, 0), None, -1)
    types = [("torch", "ByteStorage", "uint8", 1, 0, 0, "uint8", "uint8", "strided")]
    job.write([row], types, is_final=True, progress=progress)
"""

KEEPS_THE_GIL = """
import atexit, ctypes, os, sys, threading, types

case, path = sys.argv[1:3]
ends, has_arrived = threading.Event(), threading.Lock()
has_arrived.acquire()

def keep_the_gil():
    sys.setswitchinterval(1000)
    ends.set()
    assert has_arrived.acquire(timeout=600)
    ctypes.PyDLL(None).usleep(900_000)

class Last:
    def __del__(self, usleep=ctypes.CDLL(None).usleep):
        usleep(300_000)

atexit.register(keep_the_gil)  # before the extension's: hooks run from the last one on
from torch_dcpx import _C
sys.modules["last"] = types.ModuleType("last")  # as the thread keeps what this module has
sys.modules["last"].one = Last()

def hook(_done):
    if has_arrived.locked():
        has_arrived.release()
        if case == "hook":
            ctypes.CDLL(None).usleep(300_000)  # gives the GIL away, and asks for it

def work():
    fd = os.open(path, os.O_RDONLY)
    data = ctypes.create_string_buffer(1 << 20)
    ends.wait()
    if case == "return":
        has_arrived.release()
        _C.crc32(bytes(1 << 20))
        return
    # Gathered element by element: much longer than the first poll lets wait for it, 0.1 s.
    write(new_job(path, fd, "f"), data, 1024, hook)

threading.Thread(target=work, daemon=True).start()
sys.exit(3)
"""


@pytest.mark.parametrize(
    "case",
    [
        "return",  # of a call that needs no GIL
        "poll",  # of the thread that waits for workers
        "hook",  # of the user, called while workers run
    ],
)
def test_thread_that_asks_for_the_gil_as_the_interpreter_ends_is_no_abort(
    run_python: RunPython, tmp_path: Path, case: str
) -> None:
    root = str(Path(torch_dcpx.__file__).parents[1])
    env = {"PYTHONPATH": root}
    done = run_python(JOBS + KEEPS_THE_GIL, case, str(tmp_path), env=env, check=False)
    assert (done.returncode, done.stderr) == (3, "")


STOPS = """
import ctypes, os, sys, threading, warnings
from torch_dcpx import _C

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork with threads

path = sys.argv[1]
fd = os.open(path, os.O_RDONLY)
data = ctypes.create_string_buffer(1 << 20)
in_hook, goes_on = threading.Event(), threading.Event()

def hook(_done):
    in_hook.set()
    assert goes_on.wait(600)

jobs = {}

def write_named(name, columns, progress=None):
    jobs[name] = new_job(path, fd, name)
    try:
        write(jobs[name], data, columns, progress)
    finally:
        print(name, "is back", flush=True)

threading.Thread(target=write_named, args=("a", 1024, hook), daemon=True).start()
assert in_hook.wait(600)
if (child := os.fork()) == 0:
    os._exit(_C.stop_jobs(0))
print("threads of a forked child:", os.waitpid(child, 0)[1])
print("threads before:", _C.stop_jobs(0))
goes_on.set()
print("threads after:", _C.stop_jobs(600), len(_C.stopped_threads()), flush=True)
print("is whole:", jobs["a"].report()["done_bytes"] == 1024 << 20)
_C.let_jobs_begin()
later = threading.Thread(target=write_named, args=("b", 1))
later.start()
later.join(600)
sys.exit(3)
"""


def test_what_is_in_cpp_as_the_interpreter_ends_never_comes_back_and_what_begins_later_does(
    run_python: RunPython, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(Path(torch_dcpx.__file__).parents[1])}
    done = run_python(JOBS + STOPS, str(tmp_path), env=env, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines() == [
        "threads of a forked child: 0",
        "threads before: 1",
        "threads after: 0 1",
        "is whole: False",
        "b is back",
    ]


# ---- Saves in the background --------------------------------------------------------------------


def load_value(path: Path) -> float:
    """Returns the one value of a checkpoint's tensor, by stock's reader."""
    target = {"w": torch.zeros(1 << 25)}
    dcp.load(target, storage_reader=FileSystemReader(path), no_dist=True)
    low, high = target["w"].aminmax()
    assert low == high
    return float(low)


ASYNC_SAVE = """
import logging, sys, torch
from torch_dcpx import async_save
logging.basicConfig(format="%(levelname)s %(message)s")
handle = async_save({"w": torch.full((1 << 25,), 2.0)}, sys.argv[1], no_dist=True)
sys.exit(3)
"""


@pytest.mark.slow
def test_save_without_time_at_the_end_is_given_up_and_leaves_nothing_of_it(
    run_warm: RunPython, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    save({"w": torch.ones(1 << 25)}, path)
    before = sorted(os.listdir(path))
    env = {"DCPX_EXIT_TIMEOUT_S": "0"}
    done = run_warm(ASYNC_SAVE, str(path), env=env, check=False)
    assert done.returncode == 3, done.stderr
    if "while it still saves to" in done.stderr:  # else it was quicker
        assert done.stderr.count("ERROR") == 1, done.stderr
        assert sorted(os.listdir(path)) == before
        assert load_value(path) == 1.0
    else:
        assert load_value(path) == 2.0


HELD_CALL = """
import sys, torch
from support.call_shim import Action, Kind, Shim
from torch_dcpx import async_save
library, path = sys.argv[1:3]
shim = Shim(library)
shim.watch(path)
shim.arm(1, Action.HOLD, kinds=Kind.WRITES)
async_save({"w": torch.full((1 << 25,), 2.0)}, path, no_dist=True)
sys.exit(3)
"""


@pytest.mark.slow
def test_thread_in_a_system_call_that_does_not_return_is_left_behind(
    run_python: RunPython, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    save({"w": torch.ones(1 << 25)}, path)
    library = compiled(tmp_path)
    env = {**preloaded(library), "DCPX_EXIT_TIMEOUT_S": "0.1"}
    done = run_python(HELD_CALL, str(library), str(path), env=env, check=False)
    assert done.returncode == 3, done.stderr
    assert load_value(path) == 1.0
    save({"w": torch.full((1 << 25,), 3.0)}, path)
    assert load_value(path) == 3.0
    assert len(list(path.glob("*.distcp"))) == 1  # what was left has gone


# ---- Anything, at any time ----------------------------------------------------------------------

REPEATED = """
import itertools, os, sys, threading, time, traceback, torch
import torch_dcpx as dcpx

call, path, target, pause_s, ending = sys.argv[1:]
has_begun = threading.Event()

states = [{"w": torch.full((1 << 22,), float(value)), "step": value} for value in (2, 3)]

calls = {
    "save": lambda i: dcpx.save(states[i % 2], path, no_dist=True),
    "async_save": lambda i: dcpx.async_save(states[i % 2], path, no_dist=True).result(),
    "load": lambda i: dcpx.load(states[i % 2], path, no_dist=True),
    "verify": lambda _: dcpx.verify(path, progress=lambda *_: None),
    "export": lambda _: dcpx.export(path, target, overwrite=True, no_dist=True),
}

def work():
    try:
        for i in itertools.count():
            calls[call](i)
            has_begun.set()
    except dcpx.DcpxError:  # it was stopped
        if not has_begun.is_set():
            traceback.print_exc()
            os._exit(9)

threading.Thread(target=work, daemon=True).start()
assert has_begun.wait(600)
time.sleep(float(pause_s))
if ending == "sys.exit":
    sys.exit(3)
if ending == "unhandled":
    raise KeyError("unhandled")
"""
CODES = {"normal": 0, "sys.exit": 3, "unhandled": 1}


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("call", ["save", "async_save", "load", "verify", "export"])
def test_exit_at_any_time_has_the_exit_code_of_python_and_keeps_a_whole_checkpoint(
    tmp_path: Path, call: str, seed: int
) -> None:
    draw = random.Random(seed)
    path = tmp_path / "a"
    save({"w": torch.ones(1 << 22), "step": 1}, path)
    env = {**os.environ, "DCPX_EXIT_TIMEOUT_S": "0"}
    for ending in itertools.islice(itertools.cycle(CODES), 20 if EVERY_POINT else 7):
        pause_s = str(draw.random() / 5)
        args = ["-c", REPEATED, call, str(path), str(tmp_path / "b"), pause_s, ending]
        done = warm_parent().run(args, env=env)
        assert done.returncode == CODES[ending], (pause_s, ending, done.stderr)
        assert verify(path).ok
    save({"w": torch.ones(1 << 22), "step": 1}, path)
    assert len(list(path.glob("*.distcp"))) == 1
