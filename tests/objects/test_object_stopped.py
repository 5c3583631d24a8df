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
import torch.distributed as dist
from object_outcomes import MIB, Store
from support.machine import seconds
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.rank_fixture import StartRanks
from support.slow_link import SlowLink
from support.stopped_store import stopped
from support.warm import warm_parent

import torch_dcpx as dcpx
from torch_dcpx import OutcomeUnknownError, ReadOptions, StorageError, WriteOptions
from torch_dcpx._last_jobs import LAST_WAIT_S
from torch_dcpx._waiting import ANSWER_THREAD

pytestmark = s3_alone

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
def old(store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix with a checkpoint beneath it."""
    dcpx.save(LARGE, f"{store.url}/old")
    monkeypatch.setenv("DCPX_LOAD_TIMEOUT_S", str(TIMEOUT_S))
    return store.url


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
    proxy: FaultProxy, name: str, old: str
) -> None:
    option = "save_timeout_s" if name in ("save", "async_save", "export") else "load_timeout_s"
    with stopped(proxy), pytest.raises(StorageError) as caught:
        CALLS[name](old)
    assert_unanswered(caught.value, old, option)
    assert_works(old)


@pytest.mark.parametrize("step", STEPS)
def test_store_that_stops_within_a_call_ends_it_at_its_deadline(
    proxy: FaultProxy, step: str, old: str
) -> None:
    kind, name = STEPS[step]
    with stopped(proxy, kind), pytest.raises(StorageError) as caught:
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
    proxy: FaultProxy, kind: str, key: str, name: str, old: str
) -> None:
    with stopped(proxy, kind, key), small_requests(old) as others:
        with pytest.raises(StorageError) as caught:
            CALLS[name](old)
        assert others.is_alive()
    assert_unanswered(caught.value, old, f"{name}_timeout_s")
    assert_works(old)


def test_store_that_is_stopped_ends_a_call_while_bytes_move_to_another_one(
    store: Store, proxy: FaultProxy, old: str
) -> None:
    link = SlowLink(store.server.url, 300_000)
    other = WriteOptions(endpoint=link.url)
    handle = dcpx.async_save({"w": torch.arange(MIB // 2)}, f"{old}/other", options=other)  # 14 s
    try:
        with stopped(proxy), pytest.raises(StorageError) as caught:
            CALLS["load"](old)
        assert not handle.done()
        assert_unanswered(caught.value, old, "load_timeout_s")
        handle.result()
    finally:
        link.close()
    assert_works(old)


def test_commit_that_a_stopped_store_does_not_answer_is_of_unknown_outcome(
    proxy: FaultProxy, old: str
) -> None:
    with stopped(proxy, "put_object", ".metadata"), pytest.raises(OutcomeUnknownError) as e:
        CALLS["save"](old)
    assert "no answer for" in str(e.value) and f"{old}/new/.metadata" in str(e.value)
    assert_works(old)


@pytest.mark.parametrize("name", ["save", "load"])
def test_call_goes_on_when_a_store_that_was_stopped_is_back(
    proxy: FaultProxy, name: str, old: str
) -> None:
    with stopped(proxy) as goes_on:
        back = threading.Timer(TIMEOUT_S / 4, goes_on.set)
        back.start()
        CALLS[name](old)
        back.join()
    assert_works(old)


@pytest.mark.parametrize("name", ["save", "load", "ls", "export"])
def test_control_c_ends_a_call_to_a_stopped_store_at_once(
    proxy: FaultProxy, name: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPX_LOAD_TIMEOUT_S", "1000")
    calls = {
        "save": lambda: dcpx.save(LARGE, f"{old}/new"),
        "load": lambda: dcpx.load(target(), f"{old}/old"),
        "export": lambda: dcpx.export(EXPORT, f"{old}/exported"),
        "ls": lambda: dcpx.ls(old),
    }
    begun = proxy.count()

    def press() -> None:
        proxy.wait("", begun + 1)
        os.kill(os.getpid(), signal.SIGINT)

    with stopped(proxy):
        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            calls[name]()
        presser.join()
    assert_works(old)


def test_control_c_ends_an_upload_to_a_stopped_store(proxy: FaultProxy, old: str) -> None:
    """Also the removal of what was there by then: the option's bound is 1800 s."""
    pressed_at, has_ended = [0.0], threading.Event()

    def press() -> None:
        proxy.wait("upload_part")
        with stopped(proxy):
            pressed_at[0] = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
            has_ended.wait(seconds(120))

    proxy.clear()
    with stopped(proxy, "upload_part"):
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
    store: Store, proxy: FaultProxy, old: str
) -> None:
    def press(_: Request) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.4)  # longer than what tidies up waits

    proxy.hook("create_upload", press)
    with pytest.raises(KeyboardInterrupt):
        dcpx.save(LARGE, f"{old}/new")
    give_up_at = time.monotonic() + seconds(60)
    while any(one.name.startswith("dcpx-upload") for one in threading.enumerate()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    assert proxy.count("abort_upload") == 1
    assert store.server.uploads(f"{old}/new") == []


def manager_of(url: str) -> dcpx.CheckpointManager:
    return dcpx.CheckpointManager(f"{url}/run", options=WRITE, read_options=READ)


def test_managers_calls_to_a_stopped_store_raise_at_their_deadlines(
    store: Store, proxy: FaultProxy
) -> None:
    model = torch.nn.Linear(4, 4)
    manager = manager_of(store.url)
    manager.save(1, model=model).result()
    manager.wait()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("save_timeout_s", lambda: manager.save(2, model=model).result()),
        ("load_timeout_s", lambda: manager.resume(model=model)),
        ("load_timeout_s", manager.tags),
    ]
    for option, call in calls:
        with stopped(proxy), pytest.raises(StorageError) as caught:
            call()
        assert_unanswered(caught.value, f"{store.url}/run", option)
    with stopped(proxy):
        manager.close()
    assert manager_of(store.url).resume(model=model).step == 1


def test_saves_in_the_background_end_by_wait_and_close(proxy: FaultProxy, old: str) -> None:
    with stopped(proxy, "upload_part"):
        dcpx.async_save(LARGE, f"{old}/new", options=WRITE)
        with pytest.raises(StorageError) as caught:
            dcpx.wait()
        assert_unanswered(caught.value, old, "save_timeout_s")
        dcpx.close()
    assert_works(old)


_PROGRAM = """
import sys, torch, torch_dcpx as dcpx
manager = dcpx.CheckpointManager(sys.argv[1] + "/run")
manager.save(1, model=torch.nn.Linear(4, 4)).result()
handle = dcpx.async_save({"w": torch.arange(3 << 20)}, sys.argv[1] + "/new")
print("saves", flush=True)
sys.stdin.readline()
"""


def test_interpreter_ends_while_a_store_is_stopped(store: Store, proxy: FaultProxy) -> None:
    environment = os.environ | {"DCPX_EXIT_TIMEOUT_S": "2"}
    pipe: Any = subprocess.PIPE
    with stopped(proxy, "upload_part"), subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, store.url],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment,
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None and child.stdout.readline() == "saves\n"
            proxy.wait("upload_part")
            with stopped(proxy):
                began = time.monotonic()
                _, problems = child.communicate("end\n", timeout=seconds(60))
                took_s = time.monotonic() - began
        finally:
            child.kill()
    assert child.returncode == 0 and "still saves to" in problems, problems
    # 2 s of DCPX_EXIT_TIMEOUT_S, and once, not for each thing that is given up, LAST_WAIT_S.
    assert took_s < 2 + LAST_WAIT_S + seconds(2), problems


def test_sigterm_ends_a_process_that_waits_for_a_stopped_store(
    store: Store, proxy: FaultProxy, tmp_path: Path
) -> None:
    with stopped(proxy, "upload_part"), (tmp_path / "out").open("w") as out:
        child = warm_parent().start(["-c", _PROGRAM, store.url], out, out, env=os.environ)
        try:
            proxy.wait("upload_part")
            os.kill(child.pid, signal.SIGTERM)
            assert child.wait(seconds(60)) == -signal.SIGTERM
        finally:
            child.kill()


def waiting() -> list[threading.Thread]:
    """Returns the threads that make calls, without that of the loop of all uploads."""
    named = [one for one in threading.enumerate() if one.name == ANSWER_THREAD]
    return [one for one in named if "_Worker" in repr(one._target)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["load", "ls"])
def test_threads_that_a_stopped_store_keeps_are_daemons_and_end_once_it_answers(
    proxy: FaultProxy, name: str, old: str
) -> None:
    with stopped(proxy):
        with pytest.raises(StorageError):
            CALLS[name](old)
        left = waiting()
        assert left and all(thread.daemon for thread in left)
    for thread in left:
        thread.join(seconds(60))
        assert not thread.is_alive()


# ---- Ranks --------------------------------------------------------------------------------------


def of_rank() -> dict[str, torch.Tensor]:
    return {f"w{dist.get_rank()}": torch.arange(3000)}


def save_and_load(url: str) -> None:
    dcpx.save(of_rank(), f"{url}/old", options=WriteOptions(save_timeout_s=4))
    dcpx.load(of_rank(), f"{url}/old", options=ReadOptions(load_timeout_s=4))


def raise_unanswered(url: str, names: list[str]) -> None:
    write, read = WriteOptions(save_timeout_s=4), ReadOptions(load_timeout_s=4)
    calls = {
        "load": lambda: dcpx.load(of_rank(), f"{url}/old", options=read),
        "save": lambda: dcpx.save(of_rank(), f"{url}/new", options=write),
    }
    for name in names:
        with pytest.raises(StorageError) as caught:
            calls[name]()
        assert caught.value.errno == errno.ETIMEDOUT, repr(caught.value)
        assert f"'{url}/" in str(caught.value) and "no answer for 3 s" in str(caught.value)


@pytest.mark.slow
@pytest.mark.multirank
def test_all_ranks_raise_with_the_url_where_a_store_is_stopped(
    store: Store, proxy: FaultProxy, ranks: StartRanks
) -> None:
    ranks(2)(save_and_load, store.url)
    for kind, key, names in (("any", "", ["load", "save"]), ("put_object", "/new/__1_", ["save"])):
        with stopped(proxy, kind, key):
            ranks(2)(raise_unanswered, store.url, names)
    ranks(2)(save_and_load, store.url)
