"""States to export, and what an artifact holds, read by the real packages."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors
import safetensors.torch as st
import torch


def mixed_state() -> dict[str, torch.Tensor]:
    """Returns tensors of many dtypes, shapes and layouts of memory; each call the same."""
    g = torch.Generator().manual_seed(11)
    return {
        "rows": torch.randn(101, 33, generator=g),
        "narrow": torch.randn(7, 5, generator=g).bfloat16(),
        "turned": torch.randn(300, 200, generator=g).T,
        "bytes": torch.arange(13, dtype=torch.uint8),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "deep": torch.randn(4, 6, 8, 10, generator=g)[:, ::2, :, 1:],
        "flags": torch.randn(50, generator=g) > 0,
        "long": torch.arange(40_000),
    }


def read_artifact(path: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """Returns all tensors, through the index where there is one, as Hugging Face's loaders do."""
    index = path / f"{stem}.safetensors.index.json"
    single = path / f"{stem}.safetensors"
    if single.exists():
        return st.load_file(single)
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {}
    for file in sorted(set(weight_map.values())):
        with safetensors.safe_open(path / file, "pt") as held:
            names = list(held.keys())
            assert sorted(names) == sorted(n for n, f in weight_map.items() if f == file)
            found |= {name: held.get_tensor(name) for name in names}
    return found


def assert_artifact(path: Path, expected: dict[str, torch.Tensor], stem: str = "model") -> None:
    """Fails unless the artifact is whole, holds these bits, and nothing lies beside it."""
    found = read_artifact(path, stem)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert not [p.name for p in path.iterdir() if p.name.startswith(".")]
