"""The `dcpx` command: looks at checkpoints, of torch-dcpx and of stock DCP, and mends them.

It needs no process group and no GPU. Only commands that look into a checkpoint import torch.
"""

from __future__ import annotations

import sys

_MISSING = "dcpx needs {name}, which is not installed: pip install click rich\n"


def main() -> None:
    """Runs the command line. Exits: see `torch_dcpx.cli.output`."""
    try:
        from torch_dcpx.cli.app import app
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("click", "rich"):
            raise
        sys.stderr.write(_MISSING.format(name=name))
        raise SystemExit(2) from None
    app(prog_name="dcpx")
