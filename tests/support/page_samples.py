"""Checkpoints that pages draw: a small language model on eight ranks, and very many tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.chunked import chunked, grid
from support.rank_saves import rows_of, save_ranks
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torch_dcpx import timelines
from torch_dcpx._trace_files import write_if_asked
from torch_dcpx.metadata.file import encode_metadata
from torch_dcpx.storage.names import FileEntry
from torch_dcpx.timelines import Timeline

RANKS = 8
LAYERS = 6
WIDTH = 64
GRID = "model.head.mesh.weight"  # cut in both dimensions
EXPERTS = "model.layers.0.experts.w1"  # cut in the first and the last of three


def language_model() -> dict[str, torch.Tensor]:
    """Returns weights by the names and shapes that such models have, and their averages."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (512, WIDTH),
        "norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"layers.{layer}.self_attn.{name}.weight"] = (WIDTH, WIDTH)
        for name in ("gate_proj", "up_proj"):
            shapes[f"layers.{layer}.mlp.{name}.weight"] = (4 * WIDTH, WIDTH)
        shapes[f"layers.{layer}.mlp.down_proj.weight"] = (WIDTH, 4 * WIDTH)
        shapes[f"layers.{layer}.input_layernorm.weight"] = (WIDTH,)
    state = {
        f"model.{name}": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    averages = {f"optim.exp_avg.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    return state | averages


def save_language_model(directory: Path, **changes: Any) -> None:
    """Saves it from eight ranks, rows shared out; `changes` replace or, if None, remove names."""
    whole = {**language_model(), **changes}
    whole = {name: value for name, value in whole.items() if value is not None}
    mesh, experts = torch.ones(48, 32), torch.ones(4, 16, 64)
    states = []
    for rank in range(RANKS):
        state: dict[str, Any] = {"step": 100}
        for name, value in whole.items():
            is_matrix = value.dim() > 1
            state[name] = rows_of(value, rank, RANKS) if is_matrix else value
        for name, tensor, counts in ((GRID, mesh, (4, 2)), (EXPERTS, experts, (4, 1, 2))):
            box = grid(tensor.shape, counts)[rank]
            state[name] = chunked([box], [tensor[box.slices].contiguous()], tensor.shape)
        states.append(state)
    save_ranks(states, directory)


def write_traces(folder: Path, patch: pytest.MonkeyPatch, ranks: int = 4) -> None:
    """Leaves the traces of a save of so many ranks, each slower than the last, two workers each."""
    patch.setenv("DCPX_TRACE_DIR", str(folder))
    kinds = [timelines._kinds().index(name) for name in ("copy", "write")]
    for rank in range(ranks):
        timeline = Timeline("save", path="/ckpt/step-100", rank=rank)
        about = {"operation_id": "3f2a" * 8, "_epoch_ns": 0, "host": "node", "pid": 1000 + rank}
        vars(timeline).update({**about, "_thread_names": {7: "MainThread", 9: "writer"}})
        begin = 10**11 + rank * 10**7
        write = begin + 3 * 10**8, begin + (6 + 3 * rank) * 10**8
        phases = (
            (7, "plan", begin, write[0]),
            (9, "write", *write),
            (9, "vote", write[1], 102 * 10**9),
        )
        for thread, name, begin_ns, end_ns in phases:
            timeline._noted += [(thread, begin_ns, name), (thread, end_ns, "")]
        length = (write[1] - write[0]) // 10
        spans = [
            timelines._SPAN.pack(at, at + length, 1 << 20, kinds[number % 2], worker)
            for worker in range(2)
            for number, at in enumerate(range(write[0], write[1], length))
        ]
        sums = [timelines._SPAN.pack(5, 5 * length, 5 << 20, kind, 0) for kind in kinds]
        timeline._jobs.append((9, b"".join(spans), b"".join(sums)))
        write_if_asked(timeline)


def forge_many(directory: Path, tensors: int, *, ranks: int = 8, names: str = "layers") -> None:
    """Makes metadata of so many tensors and a chunk of each on every rank; files that are holes."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    files = [f"__{rank}_0.distcp" for rank in range(ranks)]
    ends = dict.fromkeys(files, 0)
    for number in range(tensors):
        fqn = f"model.layers.{number // 1000}.block.{number // 10 % 100}.weight_{number % 10}"
        fqn = fqn if names == "layers" else f"t{number}"
        rows = 8 * (1 + number % 7)
        chunks = [
            ChunkStorageMetadata(torch.Size([at * rows, 0]), torch.Size([rows, 64]))
            for at in range(ranks)
        ]
        shape = torch.Size([rows * ranks, 64])
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), shape, chunks)
        for chunk, file in zip(chunks, files, strict=True):
            nbytes = rows * 64 * 4
            storage[MetadataIndex(fqn, chunk.offsets)] = _StorageInfo(file, ends[file], nbytes)
            ends[file] += nbytes
    directory.mkdir()
    table = [FileEntry(file, bytes(16), end, 0) for file, end in ends.items()]
    for file, end in ends.items():
        with (directory / file).open("wb") as made:
            made.truncate(end)
    metadata = Metadata(entries, None, storage)
    (directory / ".metadata").write_bytes(encode_metadata(metadata, table, "0" * 32))
