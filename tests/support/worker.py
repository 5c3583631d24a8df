"""A rank of a test: it makes the process group, runs cases of a worker module, and ends well.

A worker module lies beside its test, and registers its cases in the order in which they run:

    @rank_case("save")
    def every_rank_saves_its_shard(root: Path) -> None: ...

The test runs them by `run_cases(WORKER, 2, "save", tmp_path)`, which starts on each rank

    python worker.py MODULE NAME ROOT ARGUMENTS...
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

CASES: dict[str, list[Callable[..., None]]] = defaultdict(list)


def rank_case(name: str = "all") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function of a directory and of more arguments, which are strings."""

    def registered(body: Callable[..., None]) -> Callable[..., None]:
        CASES[name].append(body)
        return body

    return registered


def run(module: str, name: str, root: str, *arguments: str) -> NoReturn:
    """Runs the cases of a name, each after all ranks have ended the one before."""
    import torch.distributed as dist

    sys.path.insert(0, os.path.dirname(module))
    importlib.import_module(Path(module).stem)
    dist.init_process_group("gloo")
    assert CASES[name], f"{module} has no case {name!r}"
    for body in CASES[name]:
        print(f"rank {dist.get_rank()} begins {body.__name__}", flush=True)
        body(Path(root), *arguments)
        dist.barrier()
    leave_well()


def leave_well() -> NoReturn:
    """Ends a worker: "done" is printed, and Python does not shut down.

    A thread of gloo may still hold a collective's tensors, and would abort the process while the
    interpreter ends. DCP's process that saves has no end of its own, either.
    """
    import torch.distributed as dist

    dist.barrier()
    print(f"rank {dist.get_rank()} done", flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from support.worker import run as run_in_module  # not this copy, which has no case

    run_in_module(*sys.argv[1:])
