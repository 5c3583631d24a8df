"""The matrix of tensors: python tests/interop/tensor_matrix.py [SEED]

Every kind of tensor in every placement, on 2, 3, 1 and 4 ranks, each launch also loading what the
one before saved. Prints a row a case and placement, and at the end what is refused, and how.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.ranks import run_cases

WORKER = Path(__file__).with_name("matrix_worker.py")
LAUNCHES = (2, 3, 1, 4)


class Row(NamedTuple):
    """What became of a case in a placement, over all launches that tried it."""

    case: str
    placement: str
    ranks: tuple[int, ...]
    verdict: str  # "ok", "refused" or "MISMATCH"
    why: str


def run(seed: int, scratch: Path, launches: Sequence[int] = LAUNCHES) -> list[Row]:
    """Runs the matrix.

    Args:
        seed: of all values.
        scratch: an empty directory.
        launches: numbers of ranks, in the order in which checkpoints are handed on.

    Returns:
        One row a case and placement; where launches disagree, the worst verdict.
    """
    rows: dict[tuple[str, str], Row] = {}
    saved = "-"
    for ranks in launches:
        save_dir, report = scratch / f"ranks{ranks}", scratch / f"ranks{ranks}.json"
        run_cases(WORKER, ranks, "all", save_dir, seed, saved, report)
        saved = str(save_dir)
        for case, placement, verdict, why in json.loads(report.read_text()):
            row = rows.get((case, placement), Row(case, placement, (), verdict, why))
            if row.verdict not in (verdict, "MISMATCH"):
                differ = f"{row.verdict} on {row.ranks} ranks, else {verdict}: {row.why} {why}"
                row = row._replace(verdict="MISMATCH", why=differ)
            rows[case, placement] = row._replace(ranks=(*row.ranks, ranks))
    return list(rows.values())


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text, the refused ones once more at the end with their messages."""
    lines = []
    for row in rows:
        ranks = ",".join(map(str, sorted(row.ranks)))
        note = row.why if row.verdict == "MISMATCH" else ""
        lines.append(f"{row.case:28} {row.placement:28} {ranks:8} {row.verdict:8} {note}".rstrip())
    refused = [row for row in rows if row.verdict == "refused"]
    better = [row for row in rows if row.verdict == "ok" and row.why]
    lines += ["", "refused:"]
    lines += [f"  {row.case} | {row.placement}\n      {row.why}" for row in refused]
    lines += ["", "kept, where stock is not able to:"]
    lines += [f"  {row.case} | {row.placement}\n      {row.why}" for row in better]
    wrong = sum(row.verdict == "MISMATCH" for row in rows)
    lines += ["", f"{len(rows)} cases, {wrong} mismatches, {len(refused)} refused"]
    return "\n".join(lines)


def main() -> int:
    import torch

    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(seed, Path(scratch))
    print(table(rows))
    print(f"torch {torch.__version__}, seed {seed}, launches of {LAUNCHES} ranks")
    return int(any(row.verdict == "MISMATCH" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
