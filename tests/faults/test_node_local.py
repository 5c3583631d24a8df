"""Directories of each node, which the coordinator cannot see: save, save again, load, by every
entry point. Each node's readers need the coordinator's `.metadata`, which users copy there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.ranks import run_ranks

WORKER = Path(__file__).with_name("node_local_worker.py")


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["paths", pytest.param("namespaces", marks=pytest.mark.root)])
def test_nodes_with_directories_of_their_own_save_again_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tests = WORKER.parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run_ranks(WORKER, 2, str(tmp_path), kind)
