"""The members of one operation (a save, a load): this process alone, or a process group."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_dcpx._arguments import check_bool
from torch_dcpx.errors import DcpxError, OptionError, must_be
from torch_dcpx.ranks.call_id import CallId
from torch_dcpx.ranks.exchange import Exchange
from torch_dcpx.ranks.store import StoreExchange
from torch_dcpx.ranks.store_client import client_of
from torch_dcpx.ranks.store_keys import Keys, LocalKeys, StoreKeys

logger = logging.getLogger("torch_dcpx")


def exchange_for(
    process_group: Any,
    no_dist: bool,
    timeout_s: float,
    what: str = "save",
    call: CallId | None = None,
) -> Exchange:
    """Begins an operation among the ranks of a group.

    Call it before anything that may raise on this rank alone, such as a check of the arguments:
    inside of the exchange the other ranks learn of the error.

    Args:
        process_group: None for the default group.
        no_dist: this process works by itself, even if torch.distributed is initialised.
        timeout_s, what, call: as `Exchange`.

    Returns a StoreExchange in a group of several ranks. Returns an Exchange of this process with
    `no_dist`, in a group of one, and where torch.distributed is unavailable or uninitialised.

    Raises:
        OptionError: arguments that name no ranks; this rank is no member of the group; or a
            launcher has started this process and others, without a group.
        StoreLostError: the group's store does not answer.
        UnsupportedError: this process was forked from the group's member.
    """
    try:
        check_ranks(process_group, no_dist)
    except OptionError as error:
        # The other ranks are in the default group, or by themselves.
        with exchange_for(None, False, timeout_s, what, call):
            raise error from None
    group, rank, world_size = _members(process_group, no_dist, what)
    if world_size == 1:
        return Exchange(timeout_s, what, call)
    exchange = StoreExchange(client_of(group), rank, world_size, timeout_s, what, call)
    return exchange.entered()


def check_ranks(process_group: Any, no_dist: Any) -> None:
    """Raises OptionError unless these name the ranks of a call, or this process alone."""
    import torch.distributed as dist

    check_bool("no_dist", no_dist)
    if process_group is None or not dist.is_available():
        return
    is_outside = process_group is dist.GroupMember.NON_GROUP_MEMBER  # of `new_group`
    if not isinstance(process_group, dist.ProcessGroup) and not is_outside:
        is_mesh = callable(getattr(process_group, "get_group", None))
        way = "; of a DeviceMesh, give mesh.get_group()" if is_mesh else ""
        wanted = "None, or a group of torch.distributed.new_group()"
        raise must_be("process_group", process_group, wanted, way)


@contextmanager
def told_to_next(
    process_group: Any, no_dist: bool, timeout_s: float, what: str, call: CallId
) -> Iterator[None]:
    """Raises an error of the block on all ranks. The block comes before an operation.

    The others are in that operation already, or will be: its first step fails. It also fails if
    all ranks raise.

    Args: as `exchange_for`. Raises: as `Exchange.all_reduce`, but an interrupt as it is.
    """
    try:
        yield
    except BaseException as error:  # Ctrl-C as well
        raised = error

        def raise_again() -> None:
            raise raised

        try:
            exchange = exchange_for(process_group, no_dist, timeout_s, what, call)
        except DcpxError as lost:
            logger.warning("%s; the other ranks are not told of: %r", lost, error)
            raise error from None
        with exchange:
            exchange.all_reduce("plan", raise_again, lambda _: None)
        raise


def keys_for(process_group: Any, no_dist: bool, what: str, name: str) -> tuple[Keys, int, int]:
    """Returns keys that the ranks of a group share beyond one operation, rank and world size.

    All ranks have agreed on `name`. Args, Raises: as `exchange_for`.
    """
    group, rank, world_size = _members(process_group, no_dist, what)
    if world_size == 1:
        return LocalKeys(), rank, world_size
    who = f"{what} on rank {rank}"
    return StoreKeys(client_of(group), f"dcpx/{name}/", who, world_size), rank, world_size


def _members(process_group: Any, no_dist: bool, what: str) -> tuple[Any, int, int]:
    """Returns the group, this rank and the number of ranks; None, 0, 1 for a process by itself."""
    import torch.distributed as dist

    if no_dist:
        return None, 0, 1
    if not (dist.is_available() and dist.is_initialized()):
        _refuse_launched(what)
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


def _refuse_launched(what: str) -> None:
    """Raises OptionError if a launcher has started several processes without a group.

    Each would take itself for the only one, and all would write the same files.
    """
    world_size = os.environ.get("WORLD_SIZE", "")
    if world_size.isascii() and world_size.isdigit() and int(world_size) > 1:
        raise OptionError(
            f"{what} in one of WORLD_SIZE={world_size} processes without a process group: call "
            "torch.distributed.init_process_group() first, or say no_dist=True where this process "
            "works by itself",
            option="process_group",
            value=None,
        )
