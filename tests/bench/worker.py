"""One rank of a bench: calls a function of this folder, and writes what it returns as JSON.

python worker.py MODULE:FUNCTION ARGUMENTS FOLDER RESULT      (named arguments, as JSON)
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    name, arguments, folder, result = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # DCP's, on every save and load
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    module, _, function = name.partition(":")
    call = getattr(importlib.import_module(module), function)
    found = call(folder=Path(folder), **json.loads(arguments))
    is_alone = not dist.is_initialized()
    if is_alone or dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    if not is_alone:
        dist.barrier()
        # No shutdown of Python: a thread of gloo may still hold a collective's tensors.
        os._exit(0)


if __name__ == "__main__":
    main()
