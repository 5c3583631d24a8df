"""The demo's own code on a tiny model: killed in a save, resumed, and compared with stock DCP."""

import importlib
import shutil
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


@pytest.fixture(scope="module")
def killed(demo: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 ranks that saved steps 2 and 4 and was killed while saving step 6."""
    root = tmp_path_factory.mktemp("killed")
    demo.train_until_killed(root, demo.TINY)
    return root


@pytest.fixture(scope="module")
def resumed_by_three(
    demo: ModuleType, killed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A copy of the killed run, resumed from step 4 by 3 ranks and trained to step 8."""
    root = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(killed, root)
    demo.go_on_with_three(root, demo.TINY, root / "ckpt" / "step-4")
    return root


@pytest.mark.slow
@pytest.mark.multirank
def test_rank_killed_in_mid_save_commits_nothing_and_loses_nothing(
    demo: ModuleType, killed: Path
) -> None:
    torn = killed / "ckpt" / f"step-{demo.TINY.kill_at}"
    assert list(torn.glob("__*.distcp"))
    assert not (torn / ".metadata").exists()
    assert demo.newest_committed(killed / "ckpt").name == "step-4"


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


@pytest.mark.slow
@pytest.mark.multirank
def test_resume_on_three_ranks_goes_on_from_the_newest_committed(
    demo: ModuleType, resumed_by_three: Path
) -> None:
    assert list(demo.read_losses(resumed_by_three / "three")) == [5, 6, 7, 8]
    assert demo.newest_committed(resumed_by_three / "ckpt").name == "step-8"
    assert (resumed_by_three / "ckpt" / "step-6" / ".metadata").exists()  # over the remains


@pytest.mark.slow
@pytest.mark.multirank
def test_ours_through_stock_and_stock_through_ours_are_equal_bit_for_bit(
    demo: ModuleType, resumed_by_three: Path
) -> None:
    demo.check_interop(resumed_by_three, demo.TINY)


@pytest.mark.slow
@pytest.mark.multirank
def test_interop_check_fails_with_the_names_of_other_losses(
    demo: ModuleType, bitwise: ModuleType, resumed_by_three: Path
) -> None:
    checkpoints = resumed_by_three / "ckpt"
    early = bitwise.load_fresh(demo.DcpxReader(checkpoints / "step-4"), fill=0xA5)
    late = bitwise.load_fresh(demo.DcpxReader(checkpoints / "step-8"), fill=0xA5)
    mismatches = bitwise.compare(early, late).mismatches
    assert {"progress.losses", "progress.step", "model.head.weight"} <= set(mismatches)
    assert "progress.run.config.width" not in mismatches


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
