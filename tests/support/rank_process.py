"""A rank of the `ranks` fixture (rank_fixture.py): makes the process group, calls what is asked."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).resolve().parents[1])
# Of a rank's environment, what is not the test's.
OWN = {
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS",
}  # fmt: skip


def _called(call: bytes) -> Any:
    """Returns what a function returns, in the environment and the directory of the test."""
    file, name, environment, directory, arguments = pickle.loads(call)
    folder = os.path.dirname(file)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    for other in os.environ.keys() - environment.keys() - OWN:
        del os.environ[other]
    os.environ.update(environment)
    os.chdir(directory)
    function = getattr(importlib.import_module(Path(file).stem), name)
    args, kwargs = pickle.loads(arguments)
    return function(*args, **kwargs)


def serve() -> None:
    """Calls what the test asks for, until the test's process closes the store or ends."""
    import torch.distributed as dist

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    asks = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(days=1))
    dist.init_process_group("gloo")
    for number in itertools.count(1):
        try:
            call = asks.get(f"call/{number}")
        except (RuntimeError, ConnectionError):  # nobody asks any more
            break
        try:
            answer = pickle.dumps((True, _called(call)))
        except SystemExit:
            raise
        except BaseException:  # noqa: BLE001  (the test fails with it)
            answer = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        asks.set(f"answer/{number}/{rank}", answer)
    # No shutdown of Python: a thread of gloo may still hold a collective's tensors.
    os._exit(0)


if __name__ == "__main__":
    sys.path[0] = TESTS
    serve()
