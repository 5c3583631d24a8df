"""Operations through the process groups of a job: sub-groups, two at once, 500 in a row, a fork."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.leaks import Held
from support.machine import seconds
from support.rank_fixture import StartRanks

from torch_dcpx.errors import OptionError, RankError, UnsupportedError
from torch_dcpx.ranks.ballot import Ballot
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.ranks.store_client import client_of


def save(group: Any, value: Any) -> Any:
    with exchange_for(group, no_dist=False, timeout_s=seconds(120)) as exchange:
        values = exchange.all_reduce("plan", lambda: value, list)
        mine = exchange.reduce_scatter("split", lambda: exchange.rank, list)
        assert mine == exchange.rank
        ballot = Ballot(exchange, exchange.deadline)
        ballot.vote(value)
        assert ballot.settle(lambda payloads: payloads, lambda: False) == values
        return values


def check_groups(rank: int, world_size: int) -> None:
    assert save(None, rank) == list(range(world_size))
    pair = dist.new_group([2, 1], use_local_synchronization=True)
    if rank in (1, 2):  # ranks of the group count, in the group's own order
        assert save(pair, rank) == [dist.get_global_rank(pair, r) for r in (0, 1)]
    others = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(OptionError, match="rank 1") as refused:
            exchange_for(others, no_dist=False, timeout_s=5)
        assert refused.value.option == "process_group"
    else:
        assert save(others, rank) == [0, 2]
    if rank in (1, 2):
        assert save(pair, "again") == ["again"] * 2
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert type(exchange_for(alone, no_dist=False, timeout_s=5)) is Exchange
    assert type(exchange_for(None, no_dist=True, timeout_s=5)) is Exchange


def check_two_groups_in_turns(rank: int) -> None:
    """A save in the background, and operations of other groups and of the same one meanwhile."""
    group = dist.new_group([0, 1, 2])
    results: list[Any] = []
    behind = exchange_for(None, no_dist=False, timeout_s=seconds(120))
    ballot = Ballot(behind, behind.deadline)
    everybody_has_loaded = threading.Event()

    def background() -> None:
        assert everybody_has_loaded.wait(seconds(120))
        ballot.vote(rank)
        results.append(ballot.settle(sum, lambda: False))
        behind.close()

    thread = threading.Thread(target=background)
    thread.start()
    for _ in range(5):
        assert save(None, rank) == [0, 1, 2]
        assert save(group, rank) == [0, 1, 2]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
    everybody_has_loaded.set()
    thread.join(seconds(120))
    assert results == [3]


def check_500_operations_leave_nothing(rank: int) -> None:
    store = client_of(dist.group.WORLD)._open_store()
    dist.barrier()
    held, keys = Held(), store.num_keys()
    for number in range(500):
        if number % 100 == 50:  # a failing one among them
            exchange = exchange_for(None, no_dist=False, timeout_s=seconds(120))
            with pytest.raises(RankError, match=r"rank 1 .*ZeroDivisionError"), exchange:
                exchange.all_reduce("plan", lambda e=exchange: 1 // (e.rank - 1), list)
            del exchange  # and the error's frames with it
        else:
            save(None, rank)
    dist.barrier()
    if rank == 0:
        assert store.num_keys() - keys <= 1, "keys are left"  # the barrier's own
    held.assert_no_file_or_thread_more()
    held.assert_no_memory_more()


def check_fork(rank: int) -> None:
    with exchange_for(None, no_dist=False, timeout_s=seconds(120)) as exchange:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                exchange.all_reduce("plan", lambda: 1, sum)
            except UnsupportedError:
                try:
                    exchange_for(None, no_dist=False, timeout_s=5)
                except UnsupportedError:
                    alone = exchange_for(None, no_dist=True, timeout_s=5)
                    status = 0 if alone.all_reduce("plan", lambda: 1, sum) == 1 else 1
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert exchange.all_reduce("plan", lambda: 1, sum) == 3
    assert save(None, rank) == [0, 1, 2]


def check_interrupt(rank: int) -> None:
    def interrupted() -> None:
        with exchange_for(None, no_dist=False, timeout_s=600) as exchange:
            if rank == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            if rank == 2:  # comes when rank 1 was interrupted while it waited
                exchange.keys.wait_for("0/wake", exchange.deadline)
            exchange.all_reduce("plan", lambda: 1, sum)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    dist.barrier()
    expected = KeyboardInterrupt if rank == 1 else RankError
    with pytest.raises(expected) as caught:
        interrupted()
    assert rank == 1 or caught.value.original == "builtins.KeyboardInterrupt"
    assert save(None, rank) == [0, 1, 2]


def operations() -> None:
    rank = dist.get_rank()
    check_groups(rank, dist.get_world_size())
    check_two_groups_in_turns(rank)
    check_500_operations_leave_nothing(rank)
    check_fork(rank)
    check_interrupt(rank)
    client = client_of(dist.group.WORLD)
    thread = client._thread
    dist.barrier()
    del client
    dist.destroy_process_group()
    assert thread is not None
    thread.join(seconds(60))
    assert not thread.is_alive(), "the group's thread outlives it"


@pytest.mark.slow
def test_operations_of_three_ranks_agree_and_leave_nothing_behind(ranks: StartRanks) -> None:
    ranks(3, anew=True)(operations)
