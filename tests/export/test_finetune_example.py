"""examples/finetune_meta.py runs, and each rank reads its own shards alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks

import torch_dcpx

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # 10 s: two processes that import torch
@pytest.mark.multirank
def test_finetune_example_reads_shards_and_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(torch_dcpx.__file__).parents[1]))
    run_ranks(ROOT / "examples" / "finetune_meta.py", 2, str(tmp_path))
    files = [path.name for path in (tmp_path / "finetune" / "tuned").iterdir()]
    assert files == ["model.safetensors"]
    source = (ROOT / "docs" / "export.md").read_text()
    assert re.search(r"examples/finetune_meta\.py", source)
