"""Ranks that are killed or stopped in a save: the others end, agree, and say who is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.machine import seconds

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("lost_ranks_worker.py")

RANK_LOST = [
    "1:entry:SIGKILL",
    "1:planning:SIGKILL",
    "1:writing:SIGKILL",
    "1:writing:SIGSTOP",
    "1:writing:SIGSTOP:continue",
]
STORE_LOST = ["0:planning:SIGKILL", "0:planning:SIGSTOP"]
COORDINATOR_LOST = [
    f"0:{phase}:{kind}"
    for phase in ("writing", "before rename", "after rename")
    for kind in ("SIGKILL", "SIGSTOP")
]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("saves")
    result = subprocess.run(
        [sys.executable, str(WORKER), str(directory), *RANK_LOST, *STORE_LOST, *COORDINATOR_LOST],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds(1150),
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return {**json.loads(result.stdout), "stderr": result.stderr}


def survivors(saves: dict[str, Any], scenario: str) -> list[list[str]]:
    """Returns (type, text) of the ranks that were left; they ended, and were not aborted."""
    victim = int(scenario[0])
    ranks = [rank for rank in range(3) if rank != victim or scenario.endswith(":continue")]
    found = saves[scenario]
    print(scenario, found, saves["stderr"][-4000:])
    assert [found["statuses"][rank] for rank in ranks] == [7] * len(ranks)
    return [found["outcomes"][rank] for rank in ranks]


@pytest.mark.parametrize("scenario", RANK_LOST)
def test_lost_rank_is_named_on_all_others_and_nothing_is_committed(
    saves: dict[str, Any], scenario: str
) -> None:
    phase = scenario.split(":")[1]
    for kind, text in survivors(saves, scenario):
        assert kind == "RankLostError"
        seen = "rank 1, not even begun" if phase == "entry" else "rank 1 ("
        assert text.startswith(seen)
        assert phase == "entry" or f"), {phase}: no sign within" in text
        assert re.search(r" of the save at '[^']+': killed", text), text
    assert saves[scenario]["is_committed"] is False


@pytest.mark.parametrize("scenario", STORE_LOST)
def test_store_lost_with_its_host_while_planning_is_an_error_on_all(
    saves: dict[str, Any], scenario: str
) -> None:
    for kind, text in survivors(saves, scenario):
        assert kind == "StoreLostError"
        assert "the process group's store" in text
    assert saves[scenario]["is_committed"] is False


@pytest.mark.parametrize("scenario", COORDINATOR_LOST)
def test_coordinator_lost_with_the_store_is_looked_up_in_the_storage(
    saves: dict[str, Any], scenario: str
) -> None:
    is_committed = scenario.split(":")[1] == "after rename"
    assert saves[scenario]["is_committed"] is is_committed
    kinds = [kind for kind, _ in survivors(saves, scenario)]
    assert kinds == ["returned" if is_committed else "OutcomeUnknownError"] * 2
