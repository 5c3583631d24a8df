"""on_gpu.sh without a GPU: whatever a stage does, the others run and each has its line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_install
import pytest
from conftest import ROOT
from gpu_runner import CANNOT, FAILED, LOG_BYTES, OK, TIMED_OUT
from gpu_stages import RESERVE_S, STAGES
from support.machine import seconds

LATE_S = seconds(300)  # after which a test gives up; none needs it
GOOD = {"name": "good", "command": ["sh", "-c", 'echo \'FIGURES {"short": "fine"}\'']}
LAST = {"name": "last", "command": ["sh", "-c", "echo done"]}
FILES = ["figures.md", "results.jsonl", "stages.log", "summary.txt"]
HANG = {
    "name": "hang",
    "command": ["sh", "-c", "echo begun; exec sleep 1000"],
    "quick": 3,
    "full": 3,
}


def start(
    tmp_path: Path, stages: list[dict[str, Any]], *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    """Starts on_gpu.sh with other stages; each has 200 s where it names no limit."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"quick": 200, "full": 200, **stage} for stage in stages]))
    out = {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    shell = ["sh", "-c", 'ulimit -Sn 256; exec "$0" "$@"', str(ROOT / "tests/cuda/on_gpu.sh")]
    return subprocess.Popen(
        [*shell, "quick", "--plan", str(plan), *arguments],
        env={**os.environ, **out, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
    )  # fmt: skip


def run(
    tmp_path: Path, stages: list[dict[str, Any]], *arguments: str, **variables: str
) -> tuple[int, str]:
    process = start(tmp_path, stages, *arguments, **variables)
    said, _ = process.communicate(timeout=LATE_S)
    return process.returncode, said


def lines_of(text: str) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {one["stage"]: one for one in found}


def results(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return lines_of((tmp_path / "out" / "results.jsonl").read_text())


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_for(path: Path, text: str) -> None:
    give_up_at = time.monotonic() + LATE_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < give_up_at, f"no {text!r} in {path.name}"
        time.sleep(0.02)


# ---- A stage goes wrong -------------------------------------------------------------------------


CRASH = "import ctypes; print('before', flush=True); ctypes.string_at(0)"
DEAF = """import signal, time
for name in ("ABRT", "TERM", "INT"):
    signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
print("deaf")
time.sleep(1000)"""
LIMITS = "$(ulimit -Sn) $(ulimit -Hn) $(ulimit -Sc)"
STUCK = "import time\ndef stuck():\n    time.sleep(1000)\nprint('begun')\nstuck()"


def test_stage_that_goes_wrong_loses_no_other_and_its_line_says_how(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    leaves = f"setsid sleep 1000 & echo $! >> {pids}; sleep 1000 & echo $! >> {pids}"
    holds = 'mkdir "/dev/shm/${ON_GPU_PREFIX}left"; echo "/dev/shm/${ON_GPU_PREFIX}left"; sleep 99'
    short = {"quick": 3}
    stages: list[dict[str, Any]] = [
        GOOD,
        {"name": "hangs", "command": ["{python}", "-c", STUCK], "quick": 6},
        {"name": "deaf", "command": ["{python}", "-c", DEAF], "quick": 6},
        {"name": "floods", "command": ["sh", "-c", "echo first; yes 2>/dev/null"], **short},
        {"name": "holds", "command": ["sh", "-c", holds], **short},
        {"name": "crashes", "command": ["{python}", "-c", CRASH]},
        {"name": "absent", "command": ["/no/such/program"]},
        {"name": "leaves", "command": ["sh", "-c", leaves]},
        {"name": "cannot", "command": ["sh", "-c", "echo CANNOT no such device; exit 77"]},
        {"name": "fails", "command": ["sh", "-c", "echo REASON no wheel; exit 1"]},
        {"name": "needs", "command": ["true"], "needs": "fails"},
        {"name": "out", "command": ["sh", "-c", 'echo "REASON out=$OUT"']},
        {"name": "limits", "command": ["sh", "-c", f"echo REASON {LIMITS}"]},
        LAST,
    ]
    status, said = run(tmp_path, stages)
    found = results(tmp_path)
    assert (status, lines_of(said)) == (1, found)
    assert {name: one["outcome"] for name, one in found.items()} == {
        **dict.fromkeys(("good", "leaves", "out", "limits", "last"), OK),
        **dict.fromkeys(("hangs", "deaf", "floods", "holds"), TIMED_OUT),
        **dict.fromkeys(("crashes", "absent", "fails"), FAILED),
        **dict.fromkeys(("cannot", "needs"), CANNOT),
    }
    reasons = {name: one["reason"] for name, one in found.items()}
    assert reasons["hangs"] == "killed after 6 s; last line: begun"
    assert reasons["crashes"] == "SIGSEGV; last line: before"
    assert reasons["absent"] == "/no/such/program: No such file or directory"
    assert (reasons["cannot"], reasons["fails"]) == ("no such device", "no wheel")
    assert reasons["out"] == "out="  # no stage knows where its output goes
    assert found["deaf"]["exit"] == -signal.SIGKILL and found["needs"]["exit"] is None
    assert found["good"]["figures"] == {"short": "fine"}
    files, most_files, core = reasons["limits"].split()
    assert (files, core) == (most_files, "0") and int(files) > 256
    left = Path(reasons["holds"].rpartition(" ")[2])
    assert left.name.startswith("dcpx-") and left.name.endswith("-left") and not left.exists()
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())
    log = (tmp_path / "out" / "stages.log").read_text()
    assert "in stuck" in log  # where a Python that hangs was
    flood = log.partition("==== floods\n")[2].partition("==== holds\n")[0]
    assert flood.startswith("first\ny\n") and " B are left out]\n" in flood
    assert len(flood) < LOG_BYTES + 200


def test_stage_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, [{**HANG, "command": ["sh", "-c", "echo pid $$.; exec sleep 99"]}])
    log = tmp_path / "out" / "stages.log"
    wait_for(log, ".")
    process.kill()
    process.communicate(timeout=LATE_S)
    pid = int(log.read_text().partition("pid ")[2].partition(".")[0])
    give_up_at = time.monotonic() + LATE_S
    while not is_gone(pid):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


# ---- The whole ----------------------------------------------------------------------------------


def test_whole_run_has_a_deadline(tmp_path: Path) -> None:
    status, _ = run(tmp_path, [{**HANG, "quick": 9}, LAST], "--total", str(RESERVE_S + 4))
    found = results(tmp_path)
    assert (found["hang"]["outcome"], status) == (TIMED_OUT, 1)
    assert (found["last"]["outcome"], found["last"]["reason"]) == (CANNOT, "no time left")


def test_all_of_a_run_comes_back_as_few_files(tmp_path: Path) -> None:
    """A remote tool brings back 8, of 16 MiB each."""
    plan = [
        {**stage._asdict(), "needs": "", "command": ["echo", *stage.command]} for stage in STAGES
    ]
    run(tmp_path, plan)
    assert sorted(os.listdir(tmp_path / "out")) == FILES
    log = (tmp_path / "out" / "stages.log").read_text()
    assert [line[5:] for line in log.splitlines() if line.startswith("==== ")] == list(
        results(tmp_path)
    )
    assert len(STAGES) * LOG_BYTES < 16 << 20
    assert str(tmp_path) not in log  # no stage is told where to write more


def test_signal_to_the_run_ends_it_with_its_lines_and_summary(tmp_path: Path) -> None:
    number = signal.SIGTERM
    process = start(tmp_path, [GOOD, {**HANG, "quick": 200}, LAST])
    wait_for(tmp_path / "out" / "stages.log", "begun")
    process.send_signal(number)
    said, _ = process.communicate(timeout=LATE_S)
    found = results(tmp_path)
    assert [one["outcome"] for one in found.values()] == [OK, FAILED, CANNOT]
    assert found["hang"]["reason"] == f"the run was ended by {number.name}"
    assert (tmp_path / "out" / "summary.txt").read_text().strip() in said
    assert process.returncode == 128 + number


def test_full_out_loses_no_stage(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in FILES:
        (tmp_path / "out" / name).symlink_to("/dev/full")
    table = json.dumps({"T": {"columns": ["a"], "rows": [[1]]}})
    good = {**GOOD, "command": ["sh", "-c", f"echo 'FIGURES {table}'"]}
    status, said = run(tmp_path, [good, LAST])
    found = lines_of(said)
    assert [one["outcome"] for one in found.values()] == [OK, OK]
    assert "results.jsonl is not written any more: No space left on device" in said
    assert found["last"]["figures"] == {}
    assert said.splitlines()[-1].startswith("2 ok in ")
    assert status == 0


# ---- The installation ---------------------------------------------------------------------------


def test_wheel_is_that_of_this_python_and_machine(tmp_path: Path) -> None:
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = os.uname().machine
    for name in (
        f"some_package-1.0-cp27-cp27m-manylinux_2_28_{machine}.whl",
        f"some_package-1.0-{here}-{here}-manylinux_2_28_sparc.whl",
    ):
        (tmp_path / name).touch()
    assert gpu_install.wheel_of("some-package", tmp_path) is None
    for name in (
        f"some_package-1.0-{here}-{here}-manylinux_2_17_{machine}.manylinux2014_{machine}.whl",
        "other-1.0-py3-none-any.whl",
        f"stable-1.0-cp310-abi3-manylinux_2_28_{machine}.whl",
    ):
        (tmp_path / name).touch()
    for package in ("some-package", "other", "stable"):
        assert gpu_install.wheel_of(package, tmp_path) is not None


def test_wheel_of_another_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_install, "ROOT", tmp_path)
    for folder in ("torch_dcpx", "site/torch_dcpx"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("same")
    assert gpu_install.strangers(tmp_path / "site", None) == []
    (tmp_path / "torch_dcpx" / "a.py").write_text("changed")
    (tmp_path / "torch_dcpx" / "b.py").write_text("new")
    assert gpu_install.strangers(tmp_path / "site", None) == ["a.py", "b.py"]
