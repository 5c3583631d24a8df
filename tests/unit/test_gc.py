"""Collections are paused for the block that asked for it, and for nobody else."""

from __future__ import annotations

import gc
import os
import threading

from torch_dcpx._gc import paused_gc


def test_collections_come_back_after_the_last_block_of_all_threads() -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        with paused_gc():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=block)
    with paused_gc():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join(60)
    assert gc.isenabled()


def test_child_forked_while_another_thread_pauses_collects() -> None:
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        with paused_gc():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=block)
    thread.start()
    assert entered.wait(60)
    child = os.fork()
    if child == 0:
        is_enabled = gc.isenabled()
        with paused_gc():
            is_paused = not gc.isenabled()
        os._exit(3 if is_enabled and is_paused and gc.isenabled() else 1)
    leave.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert gc.isenabled()


def test_child_forked_within_a_block_goes_on_with_it() -> None:
    with paused_gc():
        child = os.fork()
        if child == 0:
            before = gc.isenabled()
    if child == 0:
        os._exit(3 if not before and gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
