"""The stages of on_gpu.sh: what they make of outputs, and a rehearsal from start to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fsdp_killed
import gpu_sanitizer
import gpu_tests
import pytest
from conftest import ROOT, RunPython
from gpu_runner import CANNOT, OK, Result
from gpu_stages import STAGES
from gpu_tables import figures_page, summary_lines

SANITIZER = [
    (0, "========= ERROR SUMMARY: 0 errors", "ok"),
    (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "ok"),
    (9, "========= ERROR SUMMARY: 3 errors", "failed"),
    (0, "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)", "failed"),
    (1, "========= ERROR SUMMARY: 0 errors", "failed"),
    (0, "no summary at all", "failed"),
    (255, "========= Error: Device not supported. Please refer to", "cannot"),
    (9, "Failed to initialize a\n========= ERROR SUMMARY: 3 errors", "failed"),
    (0, "Failed to initialize a\n========= ERROR SUMMARY: 0 errors", "ok"),
    (None, "========= COMPUTE-SANITIZER", "timed out"),
]
PYTEST = [
    (0, "==== 1 passed in 3.2s ====", "passed"),
    (0, "SKIPPED [1] tests/conftest.py:9: cuda: no driver\n1 skipped", "skipped"),
    (1, "E   assert 1 == 2\n1 failed", "failed"),
    (5, "no tests ran", "failed"),
    (-11, "Fatal Python error", "crashed"),
    (None, "", "timed out"),
]


def test_words_of_the_sanitizer_and_of_pytest_are_read() -> None:
    for judge, ends in ((gpu_sanitizer.judge, SANITIZER), (gpu_tests.judge, PYTEST)):
        assert [(status, text, judge(status, text)[0]) for status, text, _ in ends] == ends


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs that use the fake driver in the GPU's place, and build it."""
    monkeypatch.setenv("ON_GPU_REHEARSAL", "1")
    monkeypatch.setenv("DCPX_CUDA_DRIVER", str(ROOT / "build/fake_cuda/libfakecuda.so"))
    paths = [ROOT, ROOT / "tests", ROOT / "tests" / "cuda", ROOT / "tests" / "bench"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


@pytest.mark.usefixtures("rehearsed")
def test_sanitized_load_that_does_nothing_is_found(run_warm: RunPython) -> None:
    code = """
import sanitized, torch_dcpx
torch_dcpx.load = lambda *_, **__: None
try:
    sanitized.main("save")
except AssertionError:
    print("found")
"""
    assert run_warm(code).stdout.endswith("found\n")


class Jobs:
    """In the place of fsdp_killed's processes: what each of the three ends with."""

    def __init__(self, root: Path, kill: int = -9, digest: str = "d", first: int = 4) -> None:
        self.root, self.kill, self.digest, self.first = root, kill, digest, first

    def __call__(self, what: str, *arguments: str) -> tuple[int, str]:
        if "--kill" in arguments:
            for step in (2, 4, 6):
                (self.root / f"step-{step}").mkdir()
            for step in (2, 4):
                (self.root / f"step-{step}" / ".metadata").touch()
            return self.kill, "SIGKILL in the middle of a save\n"
        end = {"first": self.first, "digest": self.digest if what == "resume" else "d"}
        return 0, f"ENDED {json.dumps(end)}\n"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"kill": 0}, "that is to die"), ({"digest": "other"}, "bit-equal"), ({"first": 2}, "from 2")],
)
def test_resume_that_is_not_is_told(tmp_path: Path, wrong: dict[str, object], said: str) -> None:
    assert said in fsdp_killed.stage(tmp_path, 8, Jobs(tmp_path, **wrong))  # type: ignore[arg-type]


def test_page_of_figures_has_the_cards_name_and_what_did_not_end() -> None:
    facts = {"gpu": "NVIDIA H100", "driver": 13000, "torch": "2.11.0", "python": "3.12.3"}
    facts |= {"cores": "16", "memory_gib": "128"}  # type: ignore[dict-item]
    table = {"To the host": {"columns": ["side", "GB/s"], "rows": [["ours", 50]]}}
    results = [
        Result("doctor", OK, 1.0, 0, "", facts),
        Result("moves", "timed out", 9.0, -6, "killed after 9 s", table),
    ]
    page = figures_page(results, False)
    assert page.startswith("### NVIDIA H100, driver 13000, torch 2.11.0, Python 3.12.3, 16 cores")
    assert "`moves`: timed out, killed after 9 s" in page
    assert "| ours | 50 |" in page
    assert "REHEARSAL" not in page
    assert figures_page(results, True).startswith("**REHEARSAL on a fake driver")
    assert summary_lines(results, True)[-1].startswith("REHEARSAL")


@pytest.mark.slow
def test_rehearsal_runs_every_stage_to_its_end(tmp_path: Path) -> None:
    subprocess.run(["make", "-s", "build/fake_cuda/libfakecuda.so"], cwd=ROOT, check=True)
    plan = tmp_path / "plan.json"
    # The package under test is installed already; of the `cuda` tests two are enough.
    stages = [stage._replace(needs="")._asdict() for stage in STAGES if stage.name != "install"]
    plan.write_text(json.dumps(stages))
    environment = {
        "OUT": str(tmp_path / "out"),
        "PYTHON": sys.executable,
        "STRETCH": "40",
        "ON_GPU_TESTS": "ordinals or fsdp",
    }
    done = subprocess.run(
        [str(ROOT / "tests/cuda/rehearse.sh"), "quick", "--plan", str(plan)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    found = {one["stage"]: one for one in map(json.loads, lines)}
    outcomes = {name: (one["outcome"], one["reason"]) for name, one in found.items()}
    wanted = {stage.name: (OK, "") for stage in STAGES if stage.name != "install"}
    wanted["tests"] = (CANNOT, outcomes["tests"][1])
    assert outcomes == wanted, done.stdout[-4000:]
    assert found["tests"]["figures"]["counts"] == {"skipped": 2}
    assert "bit-equal" in found["fsdp"]["figures"]["short"]
    page = (tmp_path / "out" / "figures.md").read_text()
    assert page.startswith("**REHEARSAL on a fake driver")
    for title in ("To the host", "To the device", "Stall of a save", "Page-locking", "Pieces to"):
        assert f"#### {title}" in page
    assert done.returncode == 2
    assert len(list((tmp_path / "out").iterdir())) == 4
