"""The limits of adapters where a user's copy lies beside: `rotation_worker.py trainer|accelerate`.

It works in the current directory, in the environment of the framework.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.folders import save_folder

TOLD: list[str] = []


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        TOLD.append(record.getMessage())


def trainer(root: Path) -> None:
    """A training that has gone back keeps what it has published."""
    from torch_dcpx.integrations import trainer as adapter

    folders = [root / f"checkpoint-{number}" for number in (1, 2, 3)]
    for folder in folders:
        save_folder(folder, 1.0)
    shutil.copytree(folders[0], root / "checkpoint-99999")
    (root / "checkpoint-notes").mkdir()
    assert adapter._condemned(root, 1, [folders[1]]) == [folders[0], folders[2]]
    assert adapter._condemned(root, None, [folders[1]]) == []


def accelerate(root: Path) -> None:
    """A copy that has the highest number neither counts nor goes, and is told."""
    from torch_dcpx.integrations.accelerate import DcpxAccelerator

    class Accelerator(DcpxAccelerator):
        project_dir = str(root)
        project_configuration = SimpleNamespace(automatic_checkpoint_naming=True, total_limit=1)
        _models = _optimizers = ()

        def __init__(self) -> None:
            """Makes no state of accelerate."""

    for number in (1, 2, 3):
        folder = root / "checkpoints" / f"checkpoint_{number}"
        save_folder(folder, 1.0, files=("random_states_0.pkl",))
    accelerator = Accelerator()
    assert accelerator._newest() == 3
    assert not TOLD
    shutil.copytree(folder, folder.with_name("checkpoint_100"))
    condemned = [path.name for path in accelerator._condemned("checkpoint_2")]
    assert condemned == ["checkpoint_1", "checkpoint_3"]
    assert accelerator._newest() == 100
    (told,) = TOLD
    assert "checkpoint_100' has the highest number" in told and f"'{folder}'" in told


if __name__ == "__main__":
    logging.getLogger("torch_dcpx").addHandler(Told(logging.WARNING))
    {"trainer": trainer, "accelerate": accelerate}[sys.argv[1]](Path.cwd())
