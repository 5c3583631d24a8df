"""A job that does with a manager what its standard input says, a line each: of test_root_lock.py.

python root_holder_worker.py ROOT SECONDS [no-flock], with root_lock's seconds as JSON
"""

from __future__ import annotations

import errno
import fcntl
import json
import sys
from typing import Any

import torch

from torch_dcpx import CheckpointManager, DcpxError
from torch_dcpx.storage import root_lock


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSYS, "no flock")


def main() -> None:
    root, values, *flags = sys.argv[1:]
    for name, value in json.loads(values).items():
        setattr(root_lock, name, value)
    if "no-flock" in flags:
        fcntl.flock = refuse  # type: ignore[assignment]
    manager = CheckpointManager(root, no_dist=True, async_save=False)
    state = {"x": torch.ones(8)}
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, value = line.strip().partition(" ")
        answer: Any = None
        try:
            if what == "save":
                manager.save(int(value), state=state)
            elif what == "resume":
                answer = manager.resume(state=state).step
            elif what == "close":
                manager.close()
        except DcpxError as error:
            owner = getattr(error, "owner", None)
            answer = {"error": type(error).__name__, "text": str(error), "owner": owner}
        print(json.dumps(answer), flush=True)


main()
