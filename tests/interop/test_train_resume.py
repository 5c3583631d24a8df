"""The demo's own code on a tiny model: killed in a save, resumed, and compared with stock DCP."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The driver, imported as `python examples/train_resume.py` finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module("train_resume")


@pytest.fixture(scope="module")
def bitwise(demo: ModuleType) -> ModuleType:
    """The comparison module that the driver uses."""
    return importlib.import_module("bitwise")  # the driver has imported it


@pytest.mark.slow
@pytest.mark.multirank
def test_demo_loses_nothing_to_a_kill_and_resumes_on_three_ranks_as_stock_would(
    demo: ModuleType, bitwise: ModuleType, tmp_path: Path
) -> None:
    """2 ranks save steps 2 and 4 and are killed while saving step 6; 3 go on from step 4 to 8."""
    checkpoints = tmp_path / "ckpt"
    demo.train_until_killed(tmp_path, demo.TINY)
    torn = checkpoints / f"step-{demo.TINY.kill_at}"
    assert list(torn.glob("__*.distcp"))
    assert not (torn / ".metadata").exists()
    assert demo.newest_committed(checkpoints).name == "step-4"
    demo.go_on_with_three(tmp_path, demo.TINY, checkpoints / "step-4")
    assert list(demo.read_losses(tmp_path / "three")) == [5, 6, 7, 8]
    assert demo.newest_committed(checkpoints).name == "step-8"
    assert (torn / ".metadata").exists()  # over the remains
    demo.check_interop(tmp_path, demo.TINY)
    early, late = (
        bitwise.load_fresh(demo.DcpxReader(checkpoints / name), fill=0xA5)
        for name in ("step-4", "step-8")
    )
    mismatches = bitwise.compare(early, late).mismatches
    assert {"progress.losses", "progress.step", "model.head.weight"} <= set(mismatches)
    assert "progress.run.config.width" not in mismatches


@pytest.mark.slow
@pytest.mark.multirank
def test_losses_resumed_on_two_ranks_equal_the_uninterrupted_bit_for_bit(
    demo: ModuleType, tmp_path: Path
) -> None:
    whole, half, rest = (tmp_path / name for name in ("whole", "half", "rest"))
    checkpoints = tmp_path / "ckpt"
    assert demo.torchrun(2, demo.TINY, whole, "--last-step", 8) is None
    assert demo.torchrun(2, demo.TINY, half, "--last-step", 4, "--checkpoints", checkpoints) is None
    newest = demo.newest_committed(checkpoints)
    assert demo.torchrun(2, demo.TINY, rest, "--last-step", 8, "--resume", newest) is None

    expected = demo.read_losses(whole)
    assert list(expected) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert demo.read_losses(half) == {step: expected[step] for step in (1, 2, 3, 4)}
    assert demo.read_losses(rest) == {step: expected[step] for step in (5, 6, 7, 8)}


def test_compare_names_an_entry_with_one_flipped_bit(bitwise: ModuleType) -> None:
    left = {"weight": torch.zeros(3), "step": torch.tensor(1.0), "lr": 0.0, "betas": (0.9, 0.999)}
    right = {**left, "weight": torch.tensor([0.0, -0.0, 0.0]), "lr": -0.0}
    assert bitwise.compare(left, right).mismatches == ["lr", "weight"]
    assert bitwise.compare(left, dict(left)).mismatches == []
    assert bitwise.compare(left, {**left, "extra": 1}).mismatches == ["extra"]
    assert bitwise.compare({"step": 1}, {"step": True}).mismatches == ["step"]


def test_timed_table_has_a_line_for_every_operation_and_side(
    demo: ModuleType, tmp_path: Path
) -> None:
    table = demo.measure(tmp_path, "tiny", rounds=1)
    assert len(table.splitlines()) == 1 + 3 * 3
    assert list(tmp_path.iterdir()) == []
