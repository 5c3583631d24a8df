"""What a page shows as printed, compared with what its blocks did print.

Times, sizes, fractions, long numbers and ids are those of one run; "..." stands for anything.
"""

from __future__ import annotations

import re

from support.pages import Block

_OF_ONE_RUN = [
    (r"\b\d{4}-\d\d-\d\dT[\d:]+Z", "WHEN"),
    (r"\b(?=[0-9a-f]*[a-f])(?=[a-f]*\d)[0-9a-f]{8,}\b", "ID"),
    (r"\b\d+(?:\.\d+)? (?:B|kB|MB|GB|TB)\b", "SIZE"),
    (r"\b\d+(?:\.\d+)?(?:e-?\d+)? (?:s|ms|min|h|d)\b", "TIME"),
    (r"-?\b\d+\.\d+(?:e-?\d+)?\b|\b\d{4,}\b", "NUMBER"),
    (r"\brank \d+$", "RANK"),  # the slowest one
    (r"\s+", " "),  # columns are as wide as their longest text
]


def unprinted(blocks: list[Block], printed: str) -> list[str]:
    """Returns the lines of the blocks of text that are none of those that were printed."""
    lines = {_settled(line) for line in printed.splitlines()}
    found = []
    for block in blocks:
        for line in block.code.splitlines() if block.language == "text" else ():
            pattern = ".*".join(map(re.escape, _settled(line).split("...")))
            if line.strip() and not any(re.fullmatch(pattern, each) for each in lines):
                found.append(f"{block.place}: {line}")
    return found


def _settled(line: str) -> str:
    """Returns a line without what another run prints otherwise."""
    for pattern, word in _OF_ONE_RUN:
        line = re.sub(pattern, word, line)
    return line.strip()
