"""A process of test_object_kills.py that saves until it is killed.

python object_kills_worker.py URL SEED ELEMENTS
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from object_outcomes import save, state_of

if __name__ == "__main__":
    url, seed, numel = sys.argv[1:]
    save(state_of(int(seed), int(numel)), url)
