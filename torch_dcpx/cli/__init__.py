"""The `dcpx` command: looks at checkpoints, of torch-dcpx and of stock DCP, and mends them.

It needs no process group and no GPU. Only commands that look into a checkpoint import torch.
"""

from __future__ import annotations

import signal
import sys

_MISSING = "dcpx needs {name}, which is not installed: pip install click rich\n"


def main() -> None:
    """Runs the command line. Exits: see `torch_dcpx.cli.output`."""
    try:
        _run()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def _run() -> None:
    try:
        import click

        from torch_dcpx.cli.app import app
        from torch_dcpx.cli.output import CANNOT, open_output
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if name not in ("click", "rich"):
            raise
        sys.stderr.write(_MISSING.format(name=name))
        raise SystemExit(2) from None
    open_output()
    try:
        app.main(prog_name="dcpx", standalone_mode=False)
    except click.ClickException as error:  # wrong arguments
        error.show()
        sys.exit(CANNOT)
    except click.Abort:  # as click calls an interrupt
        raise KeyboardInterrupt from None
    finally:
        sys.stdout.flush()  # whose errors have codes of their own
