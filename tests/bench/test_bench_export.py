"""The bench of exports runs, opens what it wrote, and holds its figures against their bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import EXPORT_CASES, EXPORT_SIDES, MismatchError
from export_sides import ExportSides
from safetensors.torch import load_file, save_file
from test_bench import run_bench


@pytest.mark.slow  # 15 s: processes that import torch, also on two ranks
@pytest.mark.multirank
def test_every_side_is_measured_on_each_number_of_ranks(tmp_path: Path) -> None:
    report, printed = run_bench("export.py", tmp_path, "--cases", "64mib", "--rounds", "1")
    assert [(r["case"], r["ranks"]) for r in report["results"]] == [("64mib", 1), ("64mib", 2)]
    for found in report["results"]:
        assert found["times"].keys() == {*EXPORT_SIDES, "load_and_save"}
        assert found["meters"].keys() == set(EXPORT_SIDES)
    shown = {(row["side"], row["what"], row["ranks"]) for row in report["targets"]}
    assert shown == {
        (side, what, ranks)
        for side in ("live", "stored")
        for what in ("time", "extra_peak_mib")
        for ranks in (1, 2)
    }
    assert "2 GiB of 64 MiB tensors, 2 ranks | live: time of a save" in printed


@pytest.mark.parametrize("name", EXPORT_SIDES)
def test_wrong_bits_of_a_side_are_noticed(tmp_path: Path, name: str) -> None:
    made = ExportSides(EXPORT_CASES["64mib"], "smoke", 0, 1, tmp_path)
    side = made.side(name)
    side.run(tmp_path / "out")
    side.check(tmp_path / "out")
    if name in ("live", "stored"):
        file = tmp_path / "out" / "model.safetensors"
        state = load_file(file)
        state["layer.1.weight"].view(torch.int32)[-1, -1] ^= 1
        save_file(state, file)
    else:
        made._local["layer.1.weight"].view(torch.int32)[-1, -1] ^= 1
    with pytest.raises(MismatchError, match=r"layer\.1\.weight"):
        side.check(tmp_path / "out")
