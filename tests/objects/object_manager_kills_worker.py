"""A process of test_object_manager_kills.py that saves steps until it is killed.

python object_manager_kills_worker.py URL KEEP_LAST STEP...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from object_managers import manager_of, resumed, save_steps

if __name__ == "__main__":
    url, keep_last, *steps = sys.argv[1:]
    manager = manager_of(url, keep_last=int(keep_last))
    resumed(manager)
    for step in steps:
        save_steps(manager, int(step))
    manager.close()
