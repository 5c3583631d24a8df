"""Who takes part in one operation (a save, a load): this process alone, or a process group."""

from __future__ import annotations

from typing import Any

from torch_dcpx.errors import OptionError
from torch_dcpx.exchange_base import Exchange, Keys
from torch_dcpx.local_exchange import LocalExchange
from torch_dcpx.store_client import client_of
from torch_dcpx.store_exchange import StoreExchange
from torch_dcpx.store_keys import StoreKeys

__all__ = ["Exchange", "LocalExchange", "StoreExchange", "exchange_for", "keys_for"]


def exchange_for(
    process_group: Any, no_dist: bool, timeout_s: float, what: str = "save"
) -> Exchange:
    """Begins an operation among the ranks of a group.

    Args:
        process_group: None for the default group.
        no_dist: this process by itself, even where torch.distributed is initialised.
        timeout_s: seconds until which ranks wait for each other.
        what: what is done, for messages.

    Returns:
        A LocalExchange with `no_dist`, in a group of one, and where torch.distributed is
        unavailable or uninitialised.

    Raises:
        OptionError: this rank is no member of the group.
        StoreLostError: the group's store does not answer.
        UnsupportedError: this process was forked from the group's member.
    """
    group, rank, world_size = _members(process_group, no_dist, what)
    if world_size == 1:
        return LocalExchange(timeout_s, what)
    exchange = StoreExchange(client_of(group), rank, world_size, timeout_s, what)
    try:
        exchange.enter()
    except BaseException as error:
        exchange.fail(error)
        exchange.close()
        raise
    return exchange


def keys_for(process_group: Any, no_dist: bool, what: str) -> tuple[Keys, int, int]:
    """Returns keys that the ranks of a group share beyond one operation, rank and world size.

    Every rank calls it, in the same order among the group's operations.

    Args:
        process_group, no_dist, what: as `exchange_for`.

    Raises:
        OptionError, UnsupportedError: as `exchange_for`.
    """
    group, rank, world_size = _members(process_group, no_dist, what)
    if world_size == 1:
        return LocalExchange(1.0, what).keys, rank, world_size
    client = client_of(group)
    who = f"{what} on rank {rank}"
    return StoreKeys(client, f"dcpx/{client.next_number()}/", who, world_size), rank, world_size


def _members(process_group: Any, no_dist: bool, what: str) -> tuple[Any, int, int]:
    """Returns the group, this rank and the number of ranks; one where it is by itself."""
    import torch.distributed as dist

    if no_dist or not (dist.is_available() and dist.is_initialized()):
        return None, 0, 1
    group = dist.group.WORLD if process_group is None else process_group
    rank = dist.get_rank(group)
    if rank < 0:
        raise OptionError(
            f"this process (rank {dist.get_rank()}) is no member of the process group: only its "
            f"members {what} through it",
            option="process_group",
            value=None,
        )
    return group, rank, dist.get_world_size(group)
