"""`python -m torch_dcpx.cli`, where no `dcpx` is on the path."""

from __future__ import annotations

from torch_dcpx.cli import main

main()
