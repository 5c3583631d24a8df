"""Runs the blocks of a page in order, in this directory: python STEPS.json [--fast].

All Python of a page is one program: its names live on from block to block, and it is `__main__`.
Blocks of a shell run between, in a shell each, without `pip install`: tests download nothing. With
--fast the process ends behind what runs at exit, and takes no module apart: that takes 0.3 s.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

_INSTALL = re.compile(r"^ *(?:python -m )?pip install .*$", re.MULTILINE)


def main(steps_file: str) -> int:
    """Returns 0, or 1 after the first block that fails: its place and its error are printed."""
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    for step in json.loads(Path(steps_file).read_text()):
        place = f"{step['page']}:{step['line']}"
        print(f"== {place}", flush=True)
        try:
            run(step, program)
        except BaseException:  # noqa: BLE001 - SystemExit, too, is a failure
            traceback.print_exc()
            print(f"the block at {place} failed", file=sys.stderr, flush=True)
            return 1
    return 0


def run(step: dict[str, Any], program: types.ModuleType) -> None:
    """Runs a block, or writes the file that it names."""
    code = step["code"]
    if step["file"]:
        path = Path(step["file"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    elif step["language"] == "python":
        # Lines above make a traceback name those of the page.
        compiled = compile("\n" * (step["line"] - 1) + code, step["page"], "exec")
        exec(compiled, program.__dict__)
    else:
        subprocess.run(["bash", "-euc", _INSTALL.sub(":", code)], check=True)


if __name__ == "__main__":
    sys.path[0] = ""  # the page's own files, not those beside this one
    status = main(sys.argv[1])
    if "--fast" in sys.argv:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
