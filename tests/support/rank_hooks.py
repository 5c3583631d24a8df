"""DCP's hooks for many ranks in one process: what `dcp.save` and `dcp.load` call on each of them.

Plans go to the coordinator and back through pickles, as they do between processes.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from support.plan_states import as_rank
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from torch_dcpx import DcpxLoadPlanner, DcpxReader, DcpxSavePlanner, DcpxWriter, WriteOptions

States = list[dict[str, Any]]


def dcpx_writer(path: Path) -> DcpxWriter:
    return DcpxWriter(path, options=WriteOptions(durability="none"))


SAVE_PLANNERS: dict[str, Callable[[], Any]] = {
    "ours": DcpxSavePlanner,
    "rows": lambda: DcpxSavePlanner(split_replicas=True),
    "stock": DefaultSavePlanner,
}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "ours": dcpx_writer,
    "stock": lambda path: dcp.FileSystemWriter(path, sync_files=False),
}
LOAD_PLANNERS: dict[str, Callable[[], Any]] = {
    "ours": DcpxLoadPlanner,
    "stock": DefaultLoadPlanner,
}
READERS: dict[str, Callable[[Path], Any]] = {
    "ours": DcpxReader,
    "stock": dcp.FileSystemReader,
}


def states_of(ranks: int, make: Callable[[int], dict[str, Any]]) -> States:
    """Returns what `make` makes as each rank of a group of so many."""
    states = []
    for rank in range(ranks):
        with as_rank(rank, ranks):
            states.append(make(rank))
    return states


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def save(
    states: States,
    path: Path,
    planner: str = "ours",
    writer: str = "ours",
    planners: Sequence[Any] | None = None,
) -> Metadata:
    """Saves a state a rank. Source: state_dict_saver._save_state_dict.

    Args:
        states: of the ranks.
        path: of the checkpoint.
        planner, writer: by name.
        planners: a planner a rank, in place of new ones by name.
    """
    ranks = len(states)
    planners = planners or [SAVE_PLANNERS[planner]() for _ in states]
    writers = [WRITERS[writer](path) for _ in states]
    plans = []
    for rank, state in enumerate(states):
        with as_rank(rank, ranks):
            planners[rank].set_up_planner(
                state_dict=copy.copy(state),
                storage_meta=writers[rank].storage_meta(),
                is_coordinator=rank == 0,
            )
            writers[rank].set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plan = planners[rank].create_local_plan()
            plans.append(sent(writers[rank].prepare_local_plan(plan)))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for rank, plan in enumerate(plans):
        with as_rank(rank, ranks):
            final = planners[rank].finish_plan(sent(plan))
            results.append(sent(writers[rank].write_data(final, planners[rank]).wait()))
    writers[0].finish(metadata=metadata, results=results)
    return metadata


def load(
    states: States,
    path: Path,
    planner: str = "ours",
    reader: str = "ours",
    change: Callable[[Metadata], None] | None = None,
) -> list[BaseException | None]:
    """Loads a state a rank. Source: state_dict_loader._load_state_dict.

    Args:
        states: of the ranks.
        path: of the checkpoint.
        planner, reader: by name.
        change: what is made of the metadata that each rank reads. Default nothing.

    Returns:
        The error of each rank's local plan. Where any rank has one, no rank reads a byte.
    """
    ranks = len(states)
    planners = [LOAD_PLANNERS[planner]() for _ in states]
    readers = [READERS[reader](path) for _ in states]
    plans: list[Any] = []
    errors: list[BaseException | None] = []
    for rank, state in enumerate(states):
        with as_rank(rank, ranks):
            metadata = readers[rank].read_metadata()
            if change is not None:
                change(metadata)
            planners[rank].set_up_planner(copy.copy(state), metadata, rank == 0)
            readers[rank].set_up_storage_reader(
                metadata, rank == 0, rank=rank, use_collectives=True
            )
            try:
                plan = planners[rank].create_local_plan()
                plans.append(sent(readers[rank].prepare_local_plan(plan)))
                errors.append(None)
            except Exception as error:  # noqa: BLE001 - as DCP does
                errors.append(error)
    if any(errors):
        return errors
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for rank, plan in enumerate(plans):
        with as_rank(rank, ranks):
            final = planners[rank].finish_plan(sent(plan))
            readers[rank].read_data(final, planners[rank]).wait()
    return errors
