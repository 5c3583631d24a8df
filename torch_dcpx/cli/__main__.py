"""`python -m torch_dcpx.cli`, for who has no `dcpx` on the path."""

from __future__ import annotations

from torch_dcpx.cli import main

main()
