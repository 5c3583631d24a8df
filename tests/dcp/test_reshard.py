"""DTensor states saved by N ranks and loaded by M, with stock both ways; and a rank that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multirank


def run_ranks(ranks: int, *args: str, worker: str = "reshard_worker.py") -> None:
    """Runs the worker on `ranks` ranks; fails with their output unless each of them ends well."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), str(Path(__file__).with_name(worker)), *args,
    ]  # fmt: skip
    result = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    missing = [r for r in range(ranks) if f"rank {r} done" not in result.stdout]
    assert result.returncode == 0 and not missing, f"{command}\n{result.stdout}"


@pytest.mark.timeout(600)
def test_state_of_n_ranks_loads_bit_for_bit_on_m_ranks(tmp_path: Path, seed: int) -> None:
    """2 -> 3 -> 1 -> 4 -> 2, each launch loading what the one before it saved."""
    saved = "-"
    for number, ranks in enumerate((2, 3, 1, 4, 2)):
        save_dir = str(tmp_path / str(number)) if number < 4 else "-"
        run_ranks(ranks, "exchange", str(seed % 10_000), saved, save_dir)
        saved = save_dir


@pytest.mark.timeout(300)
def test_failed_rank_raises_on_every_rank_and_publishes_nothing(tmp_path: Path, seed: int) -> None:
    run_ranks(3, "fail", str(seed % 10_000), str(tmp_path))
