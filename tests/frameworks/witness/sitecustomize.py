"""In every process of a framework's run: says what it did, and stops where it is to be killed.

Environment:
    DCPX_WITNESS          folder of the witness: <pid>.log, and <pid>.json as the process ends
    DCPX_WITNESS_STOP_AT  N: stand still before the N-th `.metadata` gets its name; make `stopped`
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

_FOLDER = Path(os.environ["DCPX_WITNESS"])
_left = int(os.environ.get("DCPX_WITNESS_STOP_AT", "0"))


def _stop_before_a_commit(event: str, arguments: tuple[Any, ...]) -> None:
    global _left
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == ".metadata":
        _left -= 1
        if _left == 0:
            (_FOLDER / "stopped").touch()
            while True:
                signal.pause()


def _tell() -> None:
    reports = sys.modules.get("torch_dcpx.reports")
    seen = {
        "command": sys.argv,
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "torch_dcpx"),
        "has_dcp": "torch.distributed.checkpoint" in sys.modules,
        "replaced": dict(reports.REPLACED) if reports else {},
    }
    (_FOLDER / f"{os.getpid()}.json").write_text(json.dumps(seen))


_logger = logging.getLogger("torch_dcpx")
_logger.setLevel(logging.DEBUG)
_logger.addHandler(logging.FileHandler(_FOLDER / f"{os.getpid()}.log", delay=True))
atexit.register(_tell)
if _left:
    sys.addaudithook(_stop_before_a_commit)
