"""examples/finetune_meta.py runs, and each rank reads and holds its own shards alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.ranks import run_cases, run_torchrun

import torch_dcpx

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 2800  # ten matrices: 299 MiB


@pytest.mark.slow  # 10 s: two processes that import torch
@pytest.mark.multirank
def test_finetune_example_reads_shards_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(torch_dcpx.__file__).parents[1]))
    run_torchrun(ROOT / "examples" / "finetune_meta.py", 2, str(tmp_path))
    files = [path.name for path in (tmp_path / "finetune" / "tuned").iterdir()]
    assert files == ["model.safetensors"]
    source = (ROOT / "docs" / "howto" / "pretrained.md").read_text()
    assert re.search(r"examples/finetune_meta\.py", source)


@pytest.mark.slow  # 20 s: two processes that import torch, 300 MiB written and read
@pytest.mark.multirank
def test_finetune_example_takes_its_share_of_the_model_and_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune_meta as example

    for width in (64, WIDTH):
        monkeypatch.setattr(example, "WIDTH", width)
        (tmp_path / f"pretrained{width}").mkdir()
        example.publish(tmp_path / f"pretrained{width}")
    worker = Path(__file__).with_name("finetune_memory_worker.py")
    run_cases(worker, 2, "all", tmp_path, WIDTH)
    tuned = tmp_path / f"tuned{WIDTH}" / "model.safetensors"
    assert tuned.stat().st_size > 10 * WIDTH * WIDTH * 4
