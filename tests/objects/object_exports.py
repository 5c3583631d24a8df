"""What a store holds of an export: downloaded, and opened by safetensors as others open it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from object_outcomes import LARGE_NUMEL, MIB
from safetensors.torch import load_file
from support.object_server import ObjectServer

import torch_dcpx as dcpx
from torch_dcpx import ExportReport, WriteOptions

MEMORY_BYTES = 20 * MIB  # the least: parts of 5 MiB
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# kind of export -> elements of its larger tensor, bytes of a shard
KINDS = {"single": (3000, 1 << 30), "parts": (LARGE_NUMEL, 1 << 30), "shards": (3000, 100)}


def tensors_of(seed: int, numel: int = 3000) -> dict[str, torch.Tensor]:
    """Returns tensors that differ by seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in (("a", numel), ("b", 7))}


def export(source: Any, url: str, kind: str = "single", **arguments: Any) -> ExportReport:
    """Exports in this process alone, with `MEMORY_BYTES`."""
    options = WriteOptions(host_memory_bytes=MEMORY_BYTES)
    arguments = {"max_shard_bytes": KINDS[kind][1], "options": options, **arguments}
    return dcpx.export(source, url, no_dist=True, overwrite=True, **arguments)


def exported(server: ObjectServer, url: str) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Returns the tensors of the artifact beneath a URL, and the names of its objects.

    Hugging Face's loaders take the single file where there is one, else the index.
    """
    with tempfile.TemporaryDirectory() as folder:

        def got(name: str) -> Path:
            Path(folder, name).write_bytes(server.get(f"{url}/{name}"))
            return Path(folder, name)

        if SINGLE in {key.rpartition("/")[2] for key in server.keys(f"{url}/")}:
            return load_file(got(SINGLE)), {SINGLE}
        weight_map = json.loads(got(INDEX).read_text())["weight_map"]
        files = set(weight_map.values())
        of_files = {file: load_file(got(file)) for file in files}
        assert {name: file for file, held in of_files.items() for name in held} == weight_map
        found = {name: of_files[file][name] for name, file in weight_map.items()}
        return found, {INDEX, *files}


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def is_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in wanted.items()
    )
