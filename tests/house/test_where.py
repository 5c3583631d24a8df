"""A stranger's questions: each is answered by one look at the list of folders.

Written before the package had rooms. Who cannot guess the folder has found a wrong name.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_dcpx"

# Question, folder of torch_dcpx ("" is its ground), and a name that is defined there.
PYTHON = [
    ("Where is the rename that commits a checkpoint?", "writer", "publish"),
    ("Where are the files of a rank written, one C++ call a window?", "writer", "write_files"),
    ("Which names may a file of a checkpoint have?", "storage", "is_data_file_name"),
    ("What stops two jobs that save to one directory?", "storage", "SaveLock"),
    ("How do ranks vote on a commit in the background?", "ranks", "Ballot"),
    ("Which error does a rank get when another has failed?", "ranks", "RankFailure"),
    ("What may a pickle in a checkpoint name?", "unpickle", "RestrictedUnpickler"),
    ("Where is the `.metadata` file decoded?", "metadata", "decode_metadata"),
    ("Where does async_save put the tensors that it has copied?", "staging", "ArenaPool"),
    ("Where is an item looked up in the files of a checkpoint?", "reader", "locate_items"),
    ("How is a safetensors header checked?", "reader", "parse_header"),
    ("What does a weight's new name do to a load?", "keys", "KeyMap"),
    ("Which rank writes what several ranks hold?", "planners", "Replicas"),
    ("What does load(strict=True) compare?", "checkpoint", "compare"),
    ("What can the caller of async_save do with what it returns?", "checkpoint", "SaveHandle"),
    ("What is wrong with a damaged checkpoint?", "integrity", "verify"),
    ("Where would a new exporter go?", "artifacts", "safetensors_layout"),
    ("What reads rows 3 to 7 of one tensor of a checkpoint?", "artifacts", "LazyTensor"),
    ("Which checkpoints does keep_last delete?", "manager", "Retention"),
    ("Which step is saved when the cluster sends SIGTERM?", "manager", "Preemption"),
    ("What does `dcpx doctor` look at?", "cli", "examine"),
    ("What does DCPX_WORKERS=8 set?", "", "options_from_environment"),
]
# The same of csrc: file and what it says.
CPP = [
    ("Who decides that what a load wants is in the page cache?", "engine/read_job.cpp", "cache"),
    ("Where is a payload's CRC-32 computed?", "format/crc32.cpp", "crc32"),
    ("Which stored boxes hold what a rank wants?", "plan/overlap.cpp", "overlap"),
    ("Where are copies from a GPU queued?", "device/copy_submit.cpp", "queue"),
]


@functools.cache
def definitions() -> dict[str, list[str]]:
    """Returns the folders, relative to the package, whose modules define a name at their top."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            room = str(path.parent.relative_to(PACKAGE))
            found.setdefault(getattr(node, "name", ""), []).append(room)
    return found


@pytest.mark.parametrize(("question", "room", "name"), PYTHON, ids=[row[0] for row in PYTHON])
def test_answer_is_where_the_folders_name_says(question: str, room: str, name: str) -> None:
    assert (room or ".") in definitions()[name]


@pytest.mark.parametrize(("question", "path", "word"), CPP, ids=[row[0] for row in CPP])
def test_answer_is_where_the_file_of_csrc_says(question: str, path: str, word: str) -> None:
    assert word in (ROOT / "csrc" / path).read_text().lower()
