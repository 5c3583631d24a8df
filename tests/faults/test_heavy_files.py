"""Files that weigh more in memory than on disk cost what they weigh, at every door."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dcpx as dcpx
from torch_dcpx import _json
from torch_dcpx._trace_files import about_merged
from torch_dcpx.errors import CorruptionError

HEAVY = Path(__file__).parents[1] / "hostile" / "heavy.py"


@pytest.mark.slow  # 5 to 20 s a kind of file
@pytest.mark.parametrize(
    "kind",
    [
        *(
            "planner data:",
            ".metadata:",
            "item:",
            "tensor item:",
            "file.pt:",
            "header",
            "own header",
        ),
        *("a header", "model.safetensors.index", "a.json", "adapter_config", "newest", "step-1/"),
        ".dcpx.root",
    ],
)
def test_no_door_takes_more_than_a_file_weighs(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, str(HEAVY), "--short", str(tmp_path), "10", kind]
    run = subprocess.run(command, capture_output=True, text=True, env=_environment())
    bad = [line for line in run.stdout.splitlines() if "TOO MUCH" in line]
    assert run.returncode == 0 and not bad, "\n".join(bad) or run.stderr[-2000:]


def _environment() -> dict[str, str]:
    paths = [str(HEAVY.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize("letter", ["\U0001f600", "\\ud83d\\ude00"], ids=["letter", "escape"])
def test_one_wide_letter_makes_a_text_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    monkeypatch.setattr(_json, "_ROOM_BYTES", 20 << 20)
    notes = b'{"__metadata__":{"n":"' + b"a" * 8_000_000 + letter.encode() + b'"}}'
    with pytest.raises(ValueError, match="of memory"):
        _json.parsed_json(notes)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(notes).to_bytes(8, "little") + notes)
    with pytest.raises(CorruptionError, match="of memory"):
        dcpx.load_tensors(path)


def test_a_merged_trace_is_known_by_its_end(tmp_path: Path) -> None:
    about = {"dcpx_trace": 1, "merged": 3, "origin_ns": 0}
    trace = {"traceEvents": [{"name": "x"}] * 9, "displayTimeUnit": "ms", "otherData": about}
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(trace))
    assert about_merged(path) == about
    path.write_text(json.dumps({**trace, "otherData": {**about, "merged": 0}}))
    assert about_merged(path) is None
    path.write_bytes(b"no JSON")
    assert about_merged(path) is None
