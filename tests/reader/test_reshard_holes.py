"""A checkpoint that does not hold once what some rank wants: named on that rank, before any reads.

Stock's planner says nothing: a hole keeps what the tensor held before.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from reshard_cases import Case, fill_with_canaries, local_parts, place, worlds
from support import rank_hooks
from support.machine import points
from support.rank_hooks import READERS, WRITERS
from support.states import assert_same
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from torch_dcpx import CorruptionError

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")

World = tuple[int, int, list[Case]]


@st.composite
def damages(draw: st.DrawFn) -> Any:
    """Returns what changes one chunk of a list: left out, there twice, shorter or longer."""
    kind = draw(st.sampled_from(["left out", "twice", "shorter", "longer"]))
    number, dim = draw(st.integers(0, 99)), draw(st.integers(0, 99))

    def damage(chunks: list[ChunkStorageMetadata], size: torch.Size) -> None:
        at = number % len(chunks)
        if kind == "left out":
            del chunks[at]
        elif kind == "twice":
            chunks.append(chunks[at])
        elif size:
            sizes = list(chunks[at].sizes)
            sizes[dim % len(size)] += -1 if kind == "shorter" else 1
            chunks[at] = ChunkStorageMetadata(chunks[at].offsets, torch.Size(sizes))

    return damage


def held(chunks: list[ChunkStorageMetadata], size: torch.Size) -> torch.Tensor:
    """Returns how often each element is stored."""
    counts = torch.zeros(size, dtype=torch.int64)
    for chunk in chunks:
        counts[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
    return counts


def is_inside(chunks: list[ChunkStorageMetadata], size: torch.Size) -> bool:
    return all(
        n >= 0 and a + n <= m
        for chunk in chunks
        for a, n, m in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


@settings(max_examples=points(40), derandomize=True)
@given(worlds(), damages(), st.sampled_from(sorted(WRITERS)), st.sampled_from(sorted(READERS)))
def test_rank_that_wants_what_is_not_stored_once_says_so_and_no_rank_reads(
    world: World, damage: Any, writer: str, reader: str
) -> None:
    saving, loading, cases = world
    assume(cases[0].whole.numel() < 3000)
    saved = rank_hooks.states_of(
        saving, lambda rank: {f"t{n}": place(c.whole, c.saved, rank) for n, c in enumerate(cases)}
    )
    size = cases[0].whole.shape
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ckpt"
        metadata = rank_hooks.save(saved, path, "ours", writer)
        damage(metadata.state_dict_metadata["t0"].chunks, size)
        chunks = metadata.state_dict_metadata["t0"].chunks
        assume(is_inside(chunks, size))
        counts = held(chunks, size).flatten()

        def change(found: Metadata) -> None:
            found.state_dict_metadata["t0"].chunks = list(chunks)

        def wanted(rank: int) -> dict[str, Any]:
            return {f"t{n}": place(c.whole, c.loaded, rank) for n, c in enumerate(cases)}

        elements = torch.arange(counts.numel()).reshape(size)
        asked = rank_hooks.states_of(
            loading, lambda rank: {"t0": place(elements, cases[0].loaded, rank)}
        )
        targets, canaries = (rank_hooks.states_of(loading, wanted) for _ in range(2))
        for state in (*targets, *canaries):
            for value in state.values():
                fill_with_canaries(value)
        errors = rank_hooks.load(targets, path, "ours", reader, change)
    for rank, error in enumerate(errors):
        own = [part.flatten() for part in local_parts(asked[rank]["t0"])]
        is_damaged = any(bool((counts[part] != 1).any()) for part in own)
        assert isinstance(error, CorruptionError) == is_damaged, (rank, error)
        if error is not None:
            assert (error.fqn, error.touched) == ("t0", ())
            assert "'t0' of sizes" in str(error) and "is wanted" in str(error)
    if any(errors):
        for mine, before in zip(targets, canaries, strict=True):
            for fqn, value in mine.items():
                assert_same(local_parts(before[fqn]), local_parts(value))
