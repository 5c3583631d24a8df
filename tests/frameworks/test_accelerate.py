"""accelerate under the hook, with `merge-weights`, and through our adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.folder_cases import PARTS, FolderCases, folders_in, options_of_bash
from support.frameworks import ROOT, WITNESS, Framework, Run, check_page, check_seen, check_typos
from support.resume_cases import AdapterCases, ResumeCases, Trained, losses_after
from support.states import assert_same
from torch.distributed.checkpoint._nested_dict import flatten_state_dict


def values_of(merged: Path) -> dict[str, Any]:
    """Returns merged values by name, sorted: stock and we write names in orders of their own."""
    state = load_file(merged) if merged.suffix == ".safetensors" else torch.load(merged)
    return dict(sorted(flatten_state_dict(state)[0].items()))


class TestFsdp2(ResumeCases):
    NAME = "accelerate"
    CHECKPOINT = "step_{}"
    REFUSES_TORN = "NotCommittedError"

    @pytest.mark.parametrize("part", ResumeCases.PARTS)
    def test_merged_weights_equal_those_of_stock(
        self, trained: Trained, tmp_path: Path, part: str
    ) -> None:
        merge = [str(trained.framework.bin / "accelerate"), "merge-weights"]
        if part == "optimizer_0":  # its numbers are no tensors, which safetensors cannot hold
            merge.append("--unsafe_serialization")
        for side, hook in (("ours", True), ("stock", False)):
            checkpoint = trained.framework.folder / side / "step_6" / part
            run = trained.framework.run([*merge, str(checkpoint), str(tmp_path / side)], hook=hook)
            if hook:
                check_seen(run, "reader")
        (ours,) = (tmp_path / "ours").iterdir()
        assert_same(values_of(tmp_path / "stock" / ours.name), values_of(ours))


class TestFsdp1(TestFsdp2):
    ARGUMENTS = ("--fsdp", 1)


OURS = ("--accelerator", "torch_dcpx.integrations.accelerate:DcpxAccelerator")


class TestAdapterOfFsdp2(FolderCases, AdapterCases):
    NAME = "accelerate"
    CHECKPOINT = "step_{}"
    OURS = OURS


class TestAdapterOfFsdp1(TestAdapterOfFsdp2):
    ARGUMENTS = ("--fsdp", 1)


@pytest.fixture(scope="module")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Framework:
    return Framework("accelerate", tmp_path_factory.mktemp("accelerate"))


def test_newest_whole_folder_goes_on_and_the_limit_counts_whole_ones(
    framework: Framework, tmp_path: Path
) -> None:
    def train(*arguments: object) -> Run:
        numbered = ("--limit", 2, "--save-every", 1, "--steps", 6)
        return framework.train(tmp_path, *OURS, *numbered, *arguments, hook=False)

    first = train()
    root = tmp_path / "checkpoints"
    assert folders_in(root) == {"checkpoint_4", "checkpoint_5"}
    torn = root / "checkpoint_5"
    (torn / "optimizer_0" / ".metadata").unlink()
    (root / "checkpoint_4" / ".dcpx.pin").touch()
    resumed = train("--resume", "newest")
    assert losses_after(0, resumed) == losses_after(5, first)
    # What is torn or pinned stays; `checkpoint_6` has the number behind all that are there.
    assert folders_in(root) == {"checkpoint_4", "checkpoint_5", "checkpoint_6"}
    shutil.move(torn, root / "checkpoint_0")
    with pytest.raises(AssertionError, match=r"OptionError: .*checkpoint_0': it is there"):
        train()


def test_failed_save_in_the_background_is_raised_by_the_next(
    framework: Framework, tmp_path: Path
) -> None:
    command = framework.torchrun(tmp_path, *OURS, "--width", 512)
    with pytest.raises(AssertionError, match="File too large"):
        framework.run([*options_of_bash("ulimit -f 256"), *command], hook=False)
    assert not folders_in(tmp_path, "step_*")


def test_ranks_that_save_elsewhere_are_told(framework: Framework) -> None:
    command = framework.torchrun("run-$RANK", *OURS)
    at = command.index(str(framework.script))
    each = ["--no-python", "bash", "-c", f"exec {framework.bin}/python {' '.join(command[at:])}"]
    with pytest.raises(AssertionError, match=r"PlanError: .*not the same call on every rank"):
        framework.run([*command[:at], *each], hook=False)


def run_case(case: str, folder: Path) -> list[Any]:
    """Returns what each of two ranks has found."""
    framework = Framework("accelerate", folder)
    command = [*framework.torchrun()[:-1], str(ROOT / "tests/frameworks/accelerate_worker.py")]
    path = f"{WITNESS}:{ROOT / 'examples' / 'frameworks'}"
    run = framework.run([*command, case, str(folder / "saved")], hook=False, PYTHONPATH=path)
    found: list[Any] = run.result["found"]
    return found


def test_hook_that_raises_on_one_rank_fails_one_save_alone(tmp_path: Path) -> None:
    for first, *others in run_case("raises", tmp_path):
        assert "the hook of rank 1" in first
        assert others == ["", ""]
    names = {"checkpoint_0", "checkpoint_1"}
    assert folders_in(tmp_path / "saved" / "checkpoints") == names


def test_what_a_hook_saves_is_there_or_all_ranks_are_told(tmp_path: Path) -> None:
    for *good, error, is_there in run_case("saves", tmp_path):
        assert good == ["", True, "", True]
        assert error.startswith("PlanError")
        assert not is_there


def test_other_state_dicts_are_refused(framework: Framework, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "from torch_dcpx.integrations.accelerate import DcpxAccelerator\n"
        f"DcpxAccelerator(cpu=True).save_state('{tmp_path}/run')\n"
    )
    with pytest.raises(AssertionError, match=r"UnsupportedError: .*saves FSDP with SHARDED"):
        framework.run([str(framework.bin / "python"), str(script)], hook=False)
    assert not (tmp_path / "run").exists()


def test_user_files_in_a_folder_stay_when_it_is_saved_again(
    framework: Framework, tmp_path: Path
) -> None:
    framework.train(tmp_path, *OURS, "--steps", 2, hook=False)
    notes = tmp_path / "step_2" / "mine" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    framework.train(tmp_path, *OURS, "--steps", 2, hook=False, ranks=1)
    assert notes.read_text() == "mine"
    names = {path.name for path in (tmp_path / "step_2").iterdir()}
    files = {".dcpx.folder", "mine", *PARTS, "custom_checkpoint_0.pkl", "random_states_0.pkl"}
    assert names == files  # nothing of the second rank is left
    assert not list(tmp_path.glob(".dcpx*"))


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("accelerate", tmp_path)


def test_limit_counts_only_what_is_ours(tmp_path: Path) -> None:
    framework = Framework("accelerate", tmp_path)
    worker = str(ROOT / "tests/frameworks/rotation_worker.py")
    framework.run([str(framework.bin / "python"), worker, "accelerate"], hook=False)


def test_typo_is_told_what_was_meant(tmp_path: Path) -> None:
    calls = {
        "DcpxAccelerator(trainable=True)": "trainable_only",
        "DcpxAccelerator(options=None)": "write_options",
        "DcpxAccelerator(mixed_precison='no')": "mixed_precision",
    }
    check_typos("accelerate", tmp_path, calls)
