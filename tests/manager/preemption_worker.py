"""`save_on_signal` where one rank cannot watch: `test_preemption.py` starts it on two ranks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.worker import rank_case
from trainings import manager_of

from torch_dcpx import OptionError

OWN = signal.SIGUSR1


def on_another_thread(call: Callable[[], Any]) -> None:
    """Calls on a thread that is not the main one, and raises its error here."""
    raised: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except OptionError as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    raise raised[0]


def here(call: Callable[[], Any]) -> None:
    call()


@rank_case()
def an_error_of_one_rank_is_raised_on_all_and_leaves_all_handlers(root: Path) -> None:
    manager = manager_of(root)
    before = signal.getsignal(OWN)
    wrong: list[Any] = [[OWN, signal.SIGKILL], [OWN, 1 << 20], [OWN, -1], [], ["SIGUSR1"], 3, None]
    for failing in (0, 1):
        for signals in wrong:
            given = signals if dist.get_rank() == failing else [OWN]
            with pytest.raises(OptionError, match=f"^rank {failing} .*signals"):
                manager.save_on_signal(given)
            assert signal.getsignal(OWN) is before
        call = on_another_thread if dist.get_rank() == failing else here
        with pytest.raises(OptionError, match=f"^rank {failing} .*main thread"):
            call(lambda: manager.save_on_signal([OWN]))
        assert signal.getsignal(OWN) is before
    with manager.save_on_signal([OWN]) as watch:
        assert signal.getsignal(OWN) is not before
        watch.signalled()
        assert [watch.requested(step) for step in range(3)].count(True) == 1
    assert signal.getsignal(OWN) is before
    assert manager.latest() is None
