"""A store that takes requests and answers none: calls raise at their deadline, or end by Ctrl-C."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine import seconds
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer
from support.ranks import run_cases
from support.slow_link import SlowLink
from support.stopped_store import stopped

import torch_dcpx as dcpx
from torch_dcpx import OutcomeUnknownError, ReadOptions, StorageError, WriteOptions
from torch_dcpx._last_jobs import LAST_WAIT_S
from torch_dcpx._waiting import ANSWER_THREAD

pytestmark = s3_alone

WORKER = Path(__file__).with_name("object_stopped_worker.py")
MIB = 1 << 20
TIMEOUT_S = 2.0
WRITE = WriteOptions(save_timeout_s=TIMEOUT_S)
READ = ReadOptions(load_timeout_s=TIMEOUT_S)
LARGE = {"w": torch.arange(3 * MIB)}  # of several parts
EXPORT = {"w": torch.ones(3)}


def target() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(3 * MIB, dtype=torch.int64)}


CALLS: dict[str, Callable[[str], Any]] = {
    "save": lambda url: dcpx.save(LARGE, f"{url}/new", options=WRITE),
    "async_save": lambda url: dcpx.async_save(LARGE, f"{url}/new", options=WRITE).result(),
    "load": lambda url: dcpx.load(target(), f"{url}/old", options=READ),
    "export": lambda url: dcpx.export(EXPORT, f"{url}/exported", options=WRITE),
    "ls": dcpx.ls,
    "verify": lambda url: dcpx.verify(f"{url}/old"),
}
STEPS = {  # where it stops: a kind of request, and whose
    "begin of an upload": ("create_upload", "save"),
    "part": ("upload_part", "save"),
    "end of an upload": ("complete_upload", "save"),
    "data": ("get_object", "load"),
}


@pytest.fixture
def old(object_prefix: str, object_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix with a checkpoint beneath it."""
    dcpx.save(LARGE, f"{object_prefix}/old")
    monkeypatch.setenv("DCPX_LOAD_TIMEOUT_S", str(TIMEOUT_S))
    return object_prefix


def assert_unanswered(error: BaseException, url: str, option: str) -> None:
    assert isinstance(error, StorageError) and error.errno == errno.ETIMEDOUT, repr(error)
    wanted = rf"'{re.escape(url)}[^']*': no answer for \d s; {option}=2 bounds the wait"
    assert re.search(wanted, str(error)), error


def assert_works(url: str) -> None:
    dcpx.save(LARGE, f"{url}/new", options=WRITE)
    found = target()
    dcpx.load(found, f"{url}/new", options=READ)
    assert torch.equal(found["w"], LARGE["w"])


@pytest.mark.parametrize("name", CALLS)
def test_call_to_a_stopped_store_raises_at_its_deadline(
    name: str, old: str, object_proxy: FaultProxy
) -> None:
    option = "save_timeout_s" if name in ("save", "async_save", "export") else "load_timeout_s"
    with stopped(object_proxy), pytest.raises(StorageError) as caught:
        CALLS[name](old)
    assert_unanswered(caught.value, old, option)
    assert_works(old)


@pytest.mark.parametrize("step", STEPS)
def test_store_that_stops_within_a_call_ends_it_at_its_deadline(
    step: str, old: str, object_proxy: FaultProxy
) -> None:
    kind, name = STEPS[step]
    with stopped(object_proxy, kind), pytest.raises(StorageError) as caught:
        CALLS[name](old)
    assert_unanswered(caught.value, old, f"{name}_timeout_s")
    assert_works(old)


@contextmanager
def small_requests(url: str) -> Iterator[threading.Thread]:
    """In the block, but not for ever, the process saves and loads little, again and again."""
    ends = threading.Event()
    last = time.monotonic() + seconds(10)

    def run() -> None:
        while time.monotonic() < last and not ends.wait(0.1):
            dcpx.save(EXPORT, f"{url}/small")
            dcpx.load({"w": torch.zeros(3)}, f"{url}/small")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "key", "name"),
    [("get_object", "/old/__", "load"), ("upload_part", "/new/", "save")],
)
def test_object_that_is_stuck_ends_a_call_though_small_requests_are_answered(
    kind: str, key: str, name: str, old: str, object_proxy: FaultProxy
) -> None:
    with stopped(object_proxy, kind, key), small_requests(old) as others:
        with pytest.raises(StorageError) as caught:
            CALLS[name](old)
        assert others.is_alive()
    assert_unanswered(caught.value, old, f"{name}_timeout_s")
    assert_works(old)


def test_store_that_is_stopped_ends_a_call_while_bytes_move_to_another_one(
    old: str, object_proxy: FaultProxy, object_server: ObjectServer
) -> None:
    link = SlowLink(object_server.url, 300_000)
    other = WriteOptions(endpoint=link.url)
    handle = dcpx.async_save({"w": torch.arange(MIB // 2)}, f"{old}/other", options=other)  # 14 s
    try:
        with stopped(object_proxy), pytest.raises(StorageError) as caught:
            CALLS["load"](old)
        assert not handle.done()
        assert_unanswered(caught.value, old, "load_timeout_s")
        handle.result()
    finally:
        link.close()
    assert_works(old)


def test_commit_that_a_stopped_store_does_not_answer_is_of_unknown_outcome(
    old: str, object_proxy: FaultProxy
) -> None:
    with stopped(object_proxy, "put_object", ".metadata"), pytest.raises(OutcomeUnknownError) as e:
        CALLS["save"](old)
    assert "no answer for" in str(e.value) and f"{old}/new/.metadata" in str(e.value)
    assert_works(old)


@pytest.mark.parametrize("name", ["save", "load"])
def test_call_goes_on_when_a_store_that_was_stopped_is_back(
    name: str, old: str, object_proxy: FaultProxy
) -> None:
    with stopped(object_proxy) as goes_on:
        back = threading.Timer(TIMEOUT_S / 4, goes_on.set)
        back.start()
        CALLS[name](old)
        back.join()
    assert_works(old)


@pytest.mark.parametrize("name", ["save", "load", "ls", "export"])
def test_control_c_ends_a_call_to_a_stopped_store_at_once(
    name: str, old: str, object_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPX_LOAD_TIMEOUT_S", "1000")
    calls = {
        "save": lambda: dcpx.save(LARGE, f"{old}/new"),
        "load": lambda: dcpx.load(target(), f"{old}/old"),
        "export": lambda: dcpx.export(EXPORT, f"{old}/exported"),
        "ls": lambda: dcpx.ls(old),
    }
    begun = object_proxy.count()

    def press() -> None:
        object_proxy.wait("", begun + 1)
        os.kill(os.getpid(), signal.SIGINT)

    with stopped(object_proxy):
        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            calls[name]()
        presser.join()
    assert_works(old)


def test_control_c_ends_an_upload_to_a_stopped_store(old: str, object_proxy: FaultProxy) -> None:
    """Also the removal of what was there by then: the option's bound is 1800 s."""
    pressed_at, has_ended = [0.0], threading.Event()

    def press() -> None:
        object_proxy.wait("upload_part")
        with stopped(object_proxy):
            pressed_at[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
            has_ended.wait(seconds(120))

    object_proxy.clear()
    with stopped(object_proxy, "upload_part"):
        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            dcpx.save(LARGE, f"{old}/new")
        took_s = time.monotonic() - pressed_at[0]
        has_ended.set()
        presser.join()
    assert took_s < seconds(10)
    assert_works(old)


def test_control_c_aborts_an_upload_that_the_store_takes_its_time_to_begin(
    old: str, object_proxy: FaultProxy, object_server: ObjectServer
) -> None:
    def press(_: Request) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.4)  # longer than what tidies up waits

    object_proxy.hook("create_upload", press)
    with pytest.raises(KeyboardInterrupt):
        dcpx.save(LARGE, f"{old}/new")
    give_up_at = time.monotonic() + seconds(60)
    while any(one.name.startswith("dcpx-upload") for one in threading.enumerate()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    assert object_proxy.count("abort_upload") == 1
    assert object_server.uploads(f"{old}/new") == []


def manager_of(url: str) -> dcpx.CheckpointManager:
    return dcpx.CheckpointManager(f"{url}/run", options=WRITE, read_options=READ)


def test_managers_calls_to_a_stopped_store_raise_at_their_deadlines(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    model = torch.nn.Linear(4, 4)
    manager = manager_of(object_prefix)
    manager.save(1, model=model).result()
    manager.wait()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("save_timeout_s", lambda: manager.save(2, model=model).result()),
        ("load_timeout_s", lambda: manager.resume(model=model)),
        ("load_timeout_s", manager.tags),
    ]
    for option, call in calls:
        with stopped(object_proxy), pytest.raises(StorageError) as caught:
            call()
        assert_unanswered(caught.value, f"{object_prefix}/run", option)
    with stopped(object_proxy):
        manager.close()
    assert manager_of(object_prefix).resume(model=model).step == 1


def test_saves_in_the_background_end_by_wait_and_close(old: str, object_proxy: FaultProxy) -> None:
    with stopped(object_proxy, "upload_part"):
        dcpx.async_save(LARGE, f"{old}/new", options=WRITE)
        with pytest.raises(StorageError) as caught:
            dcpx.wait()
        assert_unanswered(caught.value, old, "save_timeout_s")
        dcpx.close()
    assert_works(old)


@pytest.fixture
def process(object_proxy: FaultProxy, object_prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that saves in the background, and waits for a line."""
    program = """
import sys, torch, torch_dcpx as dcpx
manager = dcpx.CheckpointManager(sys.argv[1] + "/run")
manager.save(1, model=torch.nn.Linear(4, 4)).result()
handle = dcpx.async_save({"w": torch.arange(3 << 20)}, sys.argv[1] + "/new")
print("saves", flush=True)
sys.stdin.readline()
"""
    environment = os.environ | object_proxy.environment() | {"DCPX_EXIT_TIMEOUT_S": "2"}
    with stopped(object_proxy, "upload_part"):
        child = subprocess.Popen(
            [sys.executable, "-c", program, object_prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "saves\n", child.communicate()
            object_proxy.wait("upload_part")
            with stopped(object_proxy):
                yield child
        finally:
            child.kill()
            child.communicate()


def test_interpreter_ends_while_a_store_is_stopped(process: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    _, problems = process.communicate("end\n", timeout=seconds(60))
    took_s = time.monotonic() - began
    assert process.returncode == 0, problems
    assert "still saves to" in problems
    # 2 s of DCPX_EXIT_TIMEOUT_S, and once, not for each thing that is given up, LAST_WAIT_S.
    assert took_s < 2 + LAST_WAIT_S + seconds(2), problems


def test_sigterm_ends_a_process_that_waits_for_a_stopped_store(
    process: subprocess.Popen[str],
) -> None:
    process.terminate()
    process.wait(timeout=seconds(60))
    assert process.returncode == -signal.SIGTERM


def waiting() -> list[threading.Thread]:
    """Returns the threads that make calls, without that of the loop of all uploads."""
    named = [one for one in threading.enumerate() if one.name == ANSWER_THREAD]
    return [one for one in named if "_Worker" in repr(one._target)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["load", "ls"])
def test_threads_that_a_stopped_store_keeps_are_daemons_and_end_once_it_answers(
    name: str, old: str, object_proxy: FaultProxy
) -> None:
    with stopped(object_proxy):
        with pytest.raises(StorageError):
            CALLS[name](old)
        left = waiting()
        assert left and all(thread.daemon for thread in left)
    for thread in left:
        thread.join(seconds(60))
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.multirank
def test_all_ranks_raise_with_the_url_where_a_store_is_stopped(
    object_prefix: str, object_proxy: FaultProxy, object_server: ObjectServer, tmp_path: Path
) -> None:
    run_cases(WORKER, 2, "save", tmp_path, object_prefix)
    for kind, key in (("any", ""), ("put_object", "/new/__1_")):
        with stopped(object_proxy, kind, key):
            case = "all_hang" if kind == "any" else "one_hangs"
            run_cases(WORKER, 2, case, tmp_path, object_prefix)
    run_cases(WORKER, 2, "save", tmp_path, object_prefix)
