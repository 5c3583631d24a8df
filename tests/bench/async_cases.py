"""The states of async_save.py."""

from __future__ import annotations

from cases import CASES, KIB, MIB, Case, Size

ASYNC_CASES = {
    case.name: case
    for case in (
        CASES["64mib"],
        Case(
            "4000", "4,000 x 64 KiB",
            Size(4000, 64 * KIB), Size(1000, 64 * KIB), Size(40, 64 * KIB), 5, {},
        ),
        Case(
            "20000", "20,000 x 64 KiB",
            Size(20_000, 64 * KIB), Size(5000, 64 * KIB), Size(40, 64 * KIB), 5, {},
        ),
        Case(
            "16mib", "256 MiB of 16 MiB tensors",
            Size(16, 16 * MIB), Size(4, 16 * MIB), Size(2, MIB), 5, {},
        ),
    )
}  # fmt: skip
