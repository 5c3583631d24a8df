"""Functions of a test's own module run on ranks, and what a rank does is in the failure."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.rank_fixture import StartRanks


class Named(str):
    """A class of this module, which a call passes."""


def gathered(named: Named, *, more: int) -> tuple[list[int], str, str]:
    found = torch.tensor([dist.get_rank() + more])
    dist.all_reduce(found)
    return found.tolist(), f"{type(named).__name__} {named}", os.environ["OF_THE_TEST"]


def pid() -> int:
    return os.getpid()


def fails_on_one(rank: int, how: str) -> None:
    print(f"rank {dist.get_rank()} is here", flush=True)
    dist.barrier()
    if dist.get_rank() != rank:
        dist.barrier()
    elif how == "raises":
        raise KeyError("of one rank")
    elif how == "ends":
        os._exit(3)
    else:
        time.sleep(600)


def test_ranks_call_a_function_with_the_environment_and_return_what_it_returns(
    ranks: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "here")
    assert ranks(2)(gathered, Named("x"), more=3) == [([7], "Named x", "here")] * 2


def test_ranks_of_a_module_stay_unless_others_are_asked_for(ranks: StartRanks) -> None:
    kept = ranks(2)(pid)
    assert ranks(2)(pid) == kept
    assert not set(ranks(2, anew=True)(pid)) & set(kept)


@pytest.mark.parametrize(
    ("how", "why"),
    [("raises", "KeyError: 'of one rank'"), ("ends", "rank 1 ended with 3"), ("hangs", "did not")],
)
def test_failure_says_what_each_rank_raised_and_printed(
    ranks: StartRanks, how: str, why: str
) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        ranks(2).start(fails_on_one, 1, how).wait(deadline_s=2 if how == "hangs" else None)
    assert why in str(caught.value) and "rank 0 is here" in str(caught.value)
    assert len(ranks(2)(pid)) == 2, "others were started"


def lives_or_is_killed(folder: Path) -> str:
    (folder / str(dist.get_rank())).touch()
    if dist.get_rank() == 1:
        signal.pause()
    return "lived"


def test_rank_may_be_killed(ranks: StartRanks, tmp_path: Path) -> None:
    call = ranks(2, anew=True).start(lives_or_is_killed, tmp_path)
    while len(list(tmp_path.iterdir())) < 2:  # pytest ends it after its time
        time.sleep(0.01)
    call.processes[1].kill()
    assert call.wait(ended={1: -signal.SIGKILL}) == ["lived", None]
