"""Any placement on n ranks saved, any other on m loaded: each shard is its part of the whole, bit
for bit, by every pair of planner and storage.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from reshard_cases import Case, fill_with_canaries, local_parts, place, worlds
from support import rank_hooks
from support.machine import points
from support.placements import distribute
from support.rank_fixture import StartRanks
from support.rank_hooks import LOAD_PLANNERS, READERS, SAVE_PLANNERS, WRITERS
from support.states import assert_same, random_bytes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torch_dcpx as dcpx

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")

sides = st.tuples(
    st.sampled_from(sorted(SAVE_PLANNERS)),
    st.sampled_from(sorted(WRITERS)),
    st.sampled_from(sorted(LOAD_PLANNERS)),
    st.sampled_from(sorted(READERS)),
)


def check_reshard(
    world: tuple[int, int, list[Case]], side: tuple[str, str, str, str], path: Path
) -> None:
    saving, loading, cases = world
    save_planner, writer, load_planner, reader = side
    saved = rank_hooks.states_of(
        saving,
        lambda rank: {f"t{n}": place(one.whole, one.saved, rank) for n, one in enumerate(cases)},
    )
    rank_hooks.save(saved, path, save_planner, writer)

    def wanted(rank: int) -> dict[str, Any]:
        return {f"t{n}": place(one.whole, one.loaded, rank) for n, one in enumerate(cases)}

    expected, targets = (rank_hooks.states_of(loading, wanted) for _ in range(2))
    for state in targets:
        for value in state.values():
            fill_with_canaries(value)
    assert rank_hooks.load(targets, path, load_planner, reader) == [None] * loading
    for rank, state in enumerate(targets):
        for fqn, value in state.items():
            assert_same(local_parts(expected[rank][fqn]), local_parts(value), f"rank {rank} {fqn}")


@pytest.mark.slow
@settings(max_examples=points(1000))
@given(worlds(), sides)
def test_each_shard_loads_as_its_part_of_the_whole(
    world: tuple[int, int, list[Case]], side: tuple[str, str, str, str]
) -> None:
    with tempfile.TemporaryDirectory() as path:
        check_reshard(world, side, Path(path) / "ckpt")


WHOLE = random_bytes((50, 37), torch.float32, torch.Generator().manual_seed(5))
SAVED = {
    "fsdp over tp": (_StridedShard(0, split_factor=2), Shard(0)),
    "columns of tp": (Shard(0), Shard(1)),
    "replicas": (Replicate(), Shard(1)),
    "norm": (Replicate(), Replicate()),
}
LOADED = {
    "fsdp over tp": (Shard(1),),
    "columns of tp": (Shard(0),),
    "replicas": (Shard(0),),
    "norm": (Replicate(),),
}


def state(placements: dict[str, Any], mesh: Any, whole: torch.Tensor) -> dict[str, Any]:
    return {name: distribute(whole, mesh, own) for name, own in placements.items()}


def locals_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value.to_local() for value in state.values()]


def save_on_four(root: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for planner, writer in itertools.product(SAVE_PLANNERS, WRITERS):
        path = root / f"{planner} {writer}"
        dcp.save(
            state(SAVED, mesh, WHOLE),
            storage_writer=WRITERS[writer](path),
            planner=SAVE_PLANNERS[planner](),
        )


def load_on_three(root: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))
    expected = locals_of(state(LOADED, mesh, WHOLE))
    paths = sorted(root.iterdir())
    assert len(paths) == len(SAVE_PLANNERS) * len(WRITERS)
    for path, planner, reader in itertools.product(paths, LOAD_PLANNERS, READERS):
        target = state(LOADED, mesh, torch.full_like(WHOLE, -7.0))
        dcp.load(target, storage_reader=READERS[reader](path), planner=LOAD_PLANNERS[planner]())
        assert_same(expected, locals_of(target), f"{path.name} to {planner} {reader}")
    damages = {
        "hole": (lambda chunks: chunks.pop(0), [0, 1, 2]),  # rows 0:13: columns of all
        "overlap": (lambda chunks: chunks.append(chunks[0]), [0, 1, 2]),
    }
    for change, ranks in damages.values():
        refused_on_every_rank(paths[0], mesh, change, ranks)


def refused_on_every_rank(
    path: Path, mesh: Any, change: Callable[[list[Any]], Any], ranks: list[int]
) -> None:
    """A part that the ranks want is not stored once: no rank has touched a tensor."""
    reader = dcpx.DcpxReader(path)
    read = reader.read_metadata

    def changed(**kwargs: Any) -> Any:
        metadata = read(**kwargs)
        change(metadata.state_dict_metadata["fsdp over tp"].chunks)
        return metadata

    reader.read_metadata = changed  # type: ignore[method-assign]
    target = state(LOADED, mesh, torch.full_like(WHOLE, -7.0))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=reader, planner=dcpx.DcpxLoadPlanner())
    assert sorted(caught.value.failures) == ranks
    for error, _ in caught.value.failures.values():
        assert isinstance(error, dcpx.CorruptionError) and error.fqn == "fsdp over tp"
        assert "is wanted" in str(error)
    assert_same(locals_of(state(LOADED, mesh, torch.full_like(WHOLE, -7.0))), locals_of(target))


@pytest.mark.slow
def test_mesh_of_four_ranks_is_loaded_by_three(tmp_path: Path, ranks: StartRanks) -> None:
    ranks(4)(save_on_four, tmp_path)
    ranks(3)(load_on_three, tmp_path)
