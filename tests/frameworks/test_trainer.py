"""transformers' Trainer under the hook: FSDP2 with SHARDED_STATE_DICT."""

from __future__ import annotations

from pathlib import Path

from support.frameworks import check_page
from support.resume_cases import ResumeCases


class TestTrainer(ResumeCases):
    NAME = "trainer"
    CHECKPOINT = "checkpoint-{}"
    REFUSES_TORN = "trainer_state.json"


def test_commands_of_the_page_run(tmp_path: Path) -> None:
    check_page("trainer", tmp_path)
