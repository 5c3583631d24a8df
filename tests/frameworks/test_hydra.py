"""Hydra: a manager that is made by its configuration, found again by the next run."""

from __future__ import annotations

from pathlib import Path

from support.frameworks import Framework, check_all_ours


def test_runs_go_on_where_the_one_before_was_and_overrides_count(tmp_path: Path) -> None:
    hydra = Framework("hydra", tmp_path)

    def train(*overrides: str) -> dict[str, object]:
        command = [str(hydra.bin / "python"), str(hydra.script), *overrides]
        found: dict[str, object] = hydra.run(command, hook=False).result
        return found

    first = train("steps=12", "checkpoint.keep_best=null", "checkpoint.keep_last=1")
    assert first["start"] == 0
    root = tmp_path / "checkpoints" / "first"
    assert [path.name for path in root.glob("step-*")] == ["step-10"]
    second, whole = train("steps=20"), train("steps=20", "name=other")
    assert (second["start"], whole["start"]) == (10, 0)
    assert isinstance(second["losses"], dict) and isinstance(whole["losses"], dict)
    assert second["losses"].items() <= whole["losses"].items()
    kept = sorted(path.name for path in root.glob("step-*"))
    best = min(whole["losses"], key=lambda step: (int(step) % 5, whole["losses"][step]))
    assert kept == sorted({"step-15", "step-20", f"step-{best}"})
    check_all_ours(root / "step-20")


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    last = Framework("hydra", tmp_path).run_page()[-1]
    assert last.result["start"] == 10
