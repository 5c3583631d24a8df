"""`python -m torch_dcpx` is `dcpx`, where that is not on the path."""

from __future__ import annotations

from torch_dcpx.cli import main

main()
