"""A call to storage that does not return ends at the bound of its operation, or at Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.machine import seconds

from torch_dcpx._answers import StorageTimeout, answered, current_timeout, wait_at_most
from torch_dcpx.errors import StorageError
from torch_dcpx.options import ReadOptions

SOON_S = 0.2


@pytest.fixture
def stopped() -> Iterator[threading.Event]:
    """The storage: each `wait` returns once the test has set it, or at its end."""
    event = threading.Event()
    yield event
    event.set()


def unanswered(stopped: threading.Event) -> StorageError:
    with pytest.raises(StorageError) as caught:
        answered(stopped.wait, "open '/mnt/x'", "/mnt/x")
    return caught.value


def test_an_answer_is_what_the_call_returns_or_raises() -> None:
    assert answered(threading.current_thread, "look", "/x").daemon
    with pytest.raises(FileNotFoundError):
        answered(lambda: os.stat("/no/such/file"), "look", "/x")


def test_the_threads_are_used_again() -> None:
    before = {answered(threading.get_ident, "look", "/x") for _ in range(20)}
    assert len(before) < 20  # one ends its call a moment after its answer


def test_a_call_without_an_answer_raises_at_the_bound(
    stopped: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with wait_at_most(StorageTimeout(SOON_S, "save_timeout_s")):
        error = unanswered(stopped)
        unanswered(stopped)
    assert error.errno == errno.ETIMEDOUT and error.path == "/mnt/x"
    assert "open '/mnt/x'" in str(error) and "save_timeout_s=0.2" in str(error)
    (left,) = [record.message for record in caplog.records]
    assert "open '/mnt/x'" in left


def test_an_operation_that_got_no_answer_tidies_up_without_waiting_as_long_again(
    stopped: threading.Event,
) -> None:
    timeout = StorageTimeout(100.0, "save_timeout_s")
    assert timeout.wait_s == 90.0
    timeout.error("open", "/x", 90.0)
    assert 4.0 < timeout.wait_s <= 5.0
    with wait_at_most(timeout):
        answered(lambda: None, "open", "/x")
    assert 2.0 < timeout.wait_s <= 2.5


def test_an_operation_ends_by_its_bound_where_only_some_files_are_silent() -> None:
    timeout, waited_s = StorageTimeout(100.0, "load_timeout_s"), 0.0
    for _ in range(700):  # files, of which every other one is silent
        waited_s += timeout.wait_s
        timeout.error("read", "/x", timeout.wait_s)
        timeout.note_answer()
    assert waited_s < 90.0 + 2.5 + 0.625 + 0.2 + 697 * 0.1


def test_an_answer_that_comes_too_late_is_discarded(stopped: threading.Event) -> None:
    discarded = threading.Event()

    def late() -> str:
        stopped.wait()
        return "descriptor"

    def discard(found: str) -> None:
        assert found == "descriptor"
        discarded.set()

    with wait_at_most(StorageTimeout(SOON_S, "load_timeout_s")), pytest.raises(StorageError):
        answered(late, "open", "/x", discard)
    assert not discarded.is_set()
    stopped.set()
    assert discarded.wait(seconds(30))


def test_the_innermost_bound_counts_and_without_one_that_of_a_load() -> None:
    assert current_timeout().timeout_s == ReadOptions.load_timeout_s
    inner, outer = StorageTimeout(5, "save_timeout_s"), StorageTimeout(1, "load_timeout_s")
    with wait_at_most(outer):
        with wait_at_most(inner):
            assert current_timeout() is inner
        assert current_timeout() is outer


def test_control_c_ends_the_wait_at_once(stopped: threading.Event) -> None:
    discarded = threading.Event()
    begun = threading.Event()

    def call() -> bool:
        begun.set()
        return stopped.wait()

    def press() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        answered(call, "open", "/x", lambda _: discarded.set())
    presser.join()
    stopped.set()
    assert discarded.wait(seconds(30))


def test_a_signals_handler_makes_calls_of_its_own_while_its_thread_waits(
    stopped: threading.Event,
) -> None:
    found: list[int] = []

    def handle(number: int, frame: object) -> None:
        with wait_at_most(StorageTimeout(9, "save_timeout_s")):
            found.append(answered(lambda: number, "open", "/x"))
        stopped.set()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        threading.Timer(SOON_S, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        assert answered(stopped.wait, "open", "/x")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [signal.SIGUSR1]


def test_a_call_within_a_call_waits_on_the_same_thread() -> None:
    def outer() -> tuple[int, int]:
        return threading.get_ident(), answered(threading.get_ident, "inner", "/x")

    own, within = answered(outer, "outer", "/x")
    assert own == within


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )


def test_a_thread_that_is_left_behind_does_not_keep_the_process() -> None:
    ended = run(
        """
import threading
from torch_dcpx._answers import StorageTimeout, answered, wait_at_most
from torch_dcpx.errors import StorageError
with wait_at_most(StorageTimeout(0.1, "load_timeout_s")):
    try:
        answered(threading.Event().wait, "open", "/x")
    except StorageError:
        print("left")
"""
    )
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr


def test_a_child_of_a_fork_has_threads_of_its_own() -> None:
    ended = run(
        """
import os
from torch_dcpx._answers import answered
answered(os.getpid, "look", "/x")
child = os.fork()
if not child:
    os._exit(0 if answered(os.getpid, "look", "/x") == os.getpid() else 1)
assert os.waitpid(child, 0)[1] == 0
print("fine")
"""
    )
    assert (ended.returncode, ended.stdout) == (0, "fine\n"), ended.stderr
