"""transformers' Trainer with FSDP2: under the hook, and by our callback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.folder_cases import FolderCases, check_parts, folders_in, options_of_bash
from support.frameworks import ROOT, WITNESS, Framework, check_page, check_typos
from support.resume_cases import AdapterCases, ResumeCases, Trained, losses_after


class TestTrainer(ResumeCases):
    NAME = "trainer"
    CHECKPOINT = "checkpoint-{}"
    REFUSES_TORN = "trainer_state.json"


OURS = ("--callback", "torch_dcpx.integrations.trainer:DcpxCallback")


class TestTrainerCallback(FolderCases, AdapterCases):
    NAME = "trainer"
    CHECKPOINT = "checkpoint-{}"
    OURS = OURS

    def test_killed_in_a_save_the_newest_goes_on(self, trained: Trained, tmp_path: Path) -> None:
        trained.framework.kill_before_commit(4, tmp_path, *OURS, hook=False)
        # Also by stock: what was torn has no name of the Trainer's.
        resumed = trained.framework.train(tmp_path, "--resume", "newest", hook=False)
        assert losses_after(0, resumed) == losses_after(2, trained.stock)

    def test_log_history_has_the_figures_of_saves(self, trained: Trained) -> None:
        state = trained.framework.folder / "ours" / "checkpoint-6" / "trainer_state.json"
        figures = [row for row in json.loads(state.read_text())["log_history"] if "save_s" in row]
        assert [row["step"] for row in figures] == [2, 4]
        assert all(row["save_s"] > 0 and row["save_bytes"] > 100_000 for row in figures)


@pytest.fixture(scope="module")
def framework(tmp_path_factory: pytest.TempPathFactory) -> Framework:
    return Framework("trainer", tmp_path_factory.mktemp("trainer"))


def settings(**values: object) -> list[str]:
    """Returns arguments of the example: of its TrainingArguments."""
    return [f"--set={name}={json.dumps(value)}" for name, value in values.items()]


def test_limit_keeps_the_last_and_the_best_as_the_trainer_does(
    framework: Framework, tmp_path: Path
) -> None:
    best = settings(
        save_total_limit=2, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, learning_rate=0.5, metric_for_best_model="loss",
    )  # fmt: skip
    arguments = ("--save-every", 1, *best)
    found = []
    for name, ours in (("ours", OURS), ("stock", ())):
        run = framework.train(tmp_path / name, *ours, *arguments, hook=False)
        last = tmp_path / name / "checkpoint-6" / "trainer_state.json"
        state = json.loads(last.read_text())
        chosen = Path(state["best_model_checkpoint"]).name
        found.append((folders_in(tmp_path / name), chosen, run.result["losses"]))
    assert found[0] == found[1]
    assert len(found[0][0]) == 2


CALLBACKS = {"PYTHONPATH": f"{WITNESS}:{Path(__file__).parent}"}


def test_callbacks_of_users_find_folder_and_dcp_as_they_are(
    framework: Framework, tmp_path: Path
) -> None:
    arguments = ("--callback", "trainer_callbacks:Watcher", "--steps", 4)
    evaluated = settings(eval_strategy="steps", eval_steps=1)
    found = []
    for name, ours in (("ours", OURS), ("stock", ())):
        folder = tmp_path / name
        framework.train(folder, *ours, *arguments, *evaluated, hook=False, **CALLBACKS)
        assert folders_in(folder) == {"checkpoint-2"}  # the other one was called off
        assert (folder / "mine" / ".metadata").exists()
        found.append(({path.name for path in folder.iterdir()}, (folder / "log.txt").read_text()))
    assert found[0] == found[1]


def test_checkpoint_that_something_else_has_saved_is_an_error(
    framework: Framework, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="UnsupportedError: DcpxCallback: this checkpoint was"):
        framework.train(tmp_path, *OURS, *OURS, hook=False)


def test_training_that_ends_early_has_its_best_checkpoint(
    framework: Framework, tmp_path: Path
) -> None:
    ours = ("--callback", "trainer_callbacks:SlowSave", "--callback", "trainer_callbacks:Limit")
    best = settings(
        eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
        metric_for_best_model="loss",
    )  # fmt: skip
    framework.train(tmp_path, *ours, *best, hook=False, **CALLBACKS)
    assert folders_in(tmp_path) == {"checkpoint-2"}
    check_parts(tmp_path / "checkpoint-2")


def test_failed_save_in_the_background_ends_the_training(
    framework: Framework, tmp_path: Path
) -> None:
    command = framework.torchrun(tmp_path, *OURS, "--width", 256)
    with pytest.raises(AssertionError, match="File too large"):
        framework.run([*options_of_bash("ulimit -f 512"), *command], hook=False)
    assert not folders_in(tmp_path)


@pytest.mark.parametrize("setting", ["save_on_each_node", "push_to_hub", "best"])
def test_what_it_cannot_save_is_refused(framework: Framework, tmp_path: Path, setting: str) -> None:
    if setting == "best":
        values = settings(save_strategy="best", eval_strategy="steps", metric_for_best_model="loss")
    else:
        values = settings(**{setting: True})
    if setting == "push_to_hub":
        values += settings(hub_token="none")
    with pytest.raises(AssertionError, match=f"UnsupportedError: DcpxCallback with .*{setting}"):
        framework.train(tmp_path, *OURS, *values, hook=False)


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("trainer", tmp_path)


def test_limit_counts_only_what_is_ours(tmp_path: Path) -> None:
    framework = Framework("trainer", tmp_path)
    worker = str(ROOT / "tests/frameworks/rotation_worker.py")
    framework.run([str(framework.bin / "python"), worker, "trainer"], hook=False)


def test_typo_is_told_what_was_meant(tmp_path: Path) -> None:
    calls = {
        "DcpxCallback(options=None)": "write_options",
        "DcpxCallback(lora_only=True)": "trainable_only",
    }
    check_typos("trainer", tmp_path, calls)
