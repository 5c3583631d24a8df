"""A process of test_object_export_kills.py that exports until it is killed.

python object_export_kills_worker.py URL SEED KIND
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from object_exports import KINDS, export, tensors_of

if __name__ == "__main__":
    url, seed, kind = sys.argv[1:]
    export(tensors_of(int(seed), KINDS[kind][0]), url, kind)
