"""Saves of several ranks in one process, by DCP's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from support.chunked import Box, chunked
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torch_dcpx import DcpxWriter


def save_ranks(states: Sequence[dict[str, Any]], directory: Path, **kwargs: Any) -> None:
    """Saves the state of each rank, as `dcp.save` does on all of them at once."""
    coordinator, *rest = write_ranks(states, directory, **kwargs)
    coordinator.finish(*rest)


def write_ranks(
    states: Sequence[dict[str, Any]],
    directory: Path,
    make_planner: Callable[[], Any] = DefaultSavePlanner,
    **kwargs: Any,
) -> tuple[DcpxWriter, Any, list[Any]]:
    """Does so up to the commit, as a save that is killed then; returns what makes it.

    Returns:
        The coordinator's writer, and what its `finish` takes.
    """
    writers = [DcpxWriter(directory, **kwargs) for _ in states]
    planners = [make_planner() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        writer.reset(directory)
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for plan, writer, planner in zip(plans, writers, planners, strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    return writers[0], metadata, results


def rows_of(whole: torch.Tensor, rank: int, ranks: int) -> Any:
    """Returns what a rank holds of a tensor whose rows are shared out."""
    step = -(-whole.shape[0] // ranks)
    begin, end = (min(whole.shape[0], step * at) for at in (rank, rank + 1))
    box = Box((begin, *[0] * (whole.dim() - 1)), (end - begin, *whole.shape[1:]))
    return chunked([box], [whole[begin:end].contiguous()], whole.shape)


def sharded(whole: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Returns the state of each rank: matrices by rows, the rest on all of them."""

    def part(value: Any, rank: int) -> Any:
        is_matrix = isinstance(value, torch.Tensor) and value.dim() > 1
        return rows_of(value, rank, ranks) if is_matrix else value

    return [{name: part(value, rank) for name, value in whole.items()} for rank in range(ranks)]
