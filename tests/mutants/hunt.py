"""Runs the tests on each mutant of list.jsonl, and notes which test found it.

    python tests/mutants/hunt.py [--jobs 2] [--all] [--again] [--only TEXT] [--to FILE]

A mutant is made in a copy of the tree that git knows, never in the tree itself. The tests that run
on it, until one fails: the one that found it last, those of its room, of rooms above it, and with
--all every test of `make test`. Whoever starts it has built the tree (`make build`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mutate import LIST, ROOT, read

# Room of the product -> the folders of tests that see it, the nearest first.
SEES = {
    "torch_dcpx/writer": "writer planners checkpoint interop tensors faults staging",
    "torch_dcpx/reader": "reader views checkpoint interop artifacts faults tensors",
    "torch_dcpx/ranks": "ranks planners checkpoint writer reader faults manager",
    "torch_dcpx/manager": "manager faults integrations objects cli contracts",
    "torch_dcpx/storage": "storage objects writer faults manager base checkpoint contracts",
    "torch_dcpx/integrity": "integrity faults cli artifacts objects contracts",
    "torch_dcpx/artifacts": "artifacts objects contracts cli faults integrity",
    "torch_dcpx/checkpoint": "checkpoint ranks faults hook manager objects",
    "torch_dcpx/cli": "cli views integrity artifacts hook manager",
    "torch_dcpx/hook": "hook cli checkpoint manager",
    "torch_dcpx/integrations": "integrations manager hook",
    "torch_dcpx/keys": "keys artifacts checkpoint reader manager",
    "torch_dcpx/metadata": "metadata reader writer views integrity interop",
    "torch_dcpx/planners": "planners checkpoint writer ranks interop",
    "torch_dcpx/staging": "staging checkpoint writer faults manager",
    "torch_dcpx/tensors": "tensors writer reader interop staging",
    "torch_dcpx/unpickle": "unpickle metadata reader artifacts faults",
    "torch_dcpx/views": "views cli integrity artifacts",
    "torch_dcpx": "base checkpoint cli house writer reader manager",
    "csrc/bind": "native staging tensors writer reader metadata faults",
    "csrc/common": "native base tensors staging writer storage unpickle",
    "csrc/device": "native fake_cuda writer reader staging checkpoint",
    "csrc/plan": "native planners ranks reader writer staging views",
    "csrc/dcp": "planners ranks metadata writer reader native",
    "csrc/engine": "native views writer reader integrity storage staging objects faults",
    "csrc/io": "native writer storage reader faults objects",
    "csrc/format": "native metadata writer reader integrity unpickle faults interop",
}
TEST_S = 240  # one test, on an idle machine; a mutant may hang
MUTANT_S = 3600
_BUILD = ["setup.py", "-q", "build_ext", "--inplace"]
_BUILT = ("torch_dcpx/_C*.so", "build/fake_cuda", "build/temp*")


class Tree:
    """A copy of the tree with an environment of its own: its processes import no other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.rmtree(path, ignore_errors=True)
        listed = ["git", "-c", "safe.directory=*", "ls-files"]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        built = [each for glob in _BUILT for each in ROOT.glob(glob)]
        for file in [*(ROOT / name for name in files.splitlines()), *built]:
            target = path / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.is_dir():
                shutil.copytree(file, target)
            elif file.exists():
                shutil.copy2(file, target)
        venv = path / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        (packages,) = venv.glob("lib/python*/site-packages")
        # What a .pth names has its own .pth files left alone: the clone's editable install, too.
        others = [each for each in sys.path if each.endswith("site-packages")]
        (packages / "tree.pth").write_text("\n".join([str(path), *others]) + "\n")
        self.python = venv / "bin" / "python"
        for script in Path(sys.executable).parent.iterdir():
            if script.is_file() and not (self.python.parent / script.name).exists():
                head, _, rest = script.read_bytes().partition(b"\n")
                is_ours = head.startswith(b"#!") and b"python" in head
                head = b"#!" + os.fsencode(self.python) if is_ours else head
                body = head + b"\n" + rest
                (self.python.parent / script.name).write_bytes(body)
                (self.python.parent / script.name).chmod(0o755)

    def run(self, *arguments: str, timeout_s: float) -> tuple[int, str]:
        """Runs Python in a session of its own, which ends with it; returns -9 after `timeout_s`."""
        path = f"{self.python.parent}:{os.environ['PATH']}"
        process = subprocess.Popen(
            [self.python, *arguments], cwd=self.path, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
            env={**os.environ, "PATH": path, "VIRTUAL_ENV": str(self.path / ".venv")},
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            said = ""
        finally:
            code = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        return (-9 if code is None else code), said


def order(mutant: dict[str, Any], tree: Path, is_all: bool) -> list[list[str]]:
    """Returns sets of arguments for pytest, one after the other."""
    room = "/".join(mutant["file"].split("/")[:-1][:2])
    stem = Path(mutant["file"]).stem
    named = re.compile(rf"\b_?{re.escape(stem)}\b")
    sets, known = [], mutant.get("by", "nobody")
    if known != "nobody" and (tree / known.partition("::")[0]).exists():
        sets.append([known])
    folders = SEES[room].split()
    for number, folder in enumerate(folders):
        files = sorted((tree / "tests" / folder).glob("test_*.py"))  # none where it is not there
        near = [file for file in files if named.search(file.read_text()) or stem in file.stem]
        if number < 3:
            sets.append([str(file.relative_to(tree)) for file in near])
        if number == 2:
            sets += [[f"tests/{each}"] for each in folders[:3]]
        elif number > 2:
            sets.append([f"tests/{folder}"])
    if is_all:
        sets.append(["tests", *(f"--ignore=tests/{folder}" for folder in folders)])
    return [each for each in sets if each]


def hunted(mutant: dict[str, Any], tree: Tree, is_all: bool) -> str:
    """Returns the test that found the mutant, or "nobody"."""
    file = tree.path / mutant["file"]
    source = file.read_text()
    if source.count(mutant["old"]) != 1:
        return "not there any more"
    file.write_text(source.replace(mutant["old"], mutant["new"]))
    is_cpp = file.suffix != ".py"
    give_up_at = time.monotonic() + MUTANT_S
    try:
        if is_cpp and tree.run(*_BUILD, timeout_s=1200)[0]:
            return "the compiler"
        for tests in order(mutant, tree.path, is_all):
            left_s = give_up_at - time.monotonic()
            code, said = tree.run(
                "-m", "pytest", "-x", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider",
                "--tb=line", "-m", "not slow and not root", f"--timeout={TEST_S}", *tests,
                timeout_s=left_s,
            )  # fmt: skip
            found = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.*?)?)(?: - |$)", said, re.M)
            if code == -9:
                return "the time"
            if found:
                return found[0]
            if code in (3, 4):
                raise RuntimeError(f"pytest {tests}: {said}")
            if code not in (0, 5):  # a crash, a test's own time, an error while collecting
                return tests[0]
        return "nobody"
    finally:
        file.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once (2)")
    parser.add_argument("--all", action="store_true", help="every test of `make test`, at last")
    parser.add_argument("--again", action="store_true", help="those too that somebody found")
    parser.add_argument("--only", default="", help="mutants whose line has this text")
    parser.add_argument("--to", type=Path, default=LIST, help="where the list is written")
    given = parser.parse_args()
    mutants = read()
    trees: queue.Queue[Tree] = queue.Queue()
    for number in range(given.jobs):
        trees.put(Tree(ROOT / "build" / "mutants" / str(number)))
    lock = threading.Lock()

    def hunt(mutant: dict[str, Any]) -> None:
        tree, began = trees.get(), time.monotonic()
        try:
            by = hunted(mutant, tree, given.all)
        finally:
            trees.put(tree)
        with lock:
            mutant["by"] = by
            given.to.write_text("".join(json.dumps(each) + "\n" for each in mutants))
            took = f"{time.monotonic() - began:6.0f} s"
            print(f"{took}  {mutant['file']}  {mutant['kind']}: {by}", flush=True)
            if by == "nobody":
                print(f"-{mutant['old']}\n+{mutant['new']}", flush=True)

    asked = [m for m in mutants if given.only in json.dumps(m) and (given.again or "by" not in m)]
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for done in [pool.submit(hunt, mutant) for mutant in asked]:
            done.result()
    lost = sum(mutant["by"] == "nobody" for mutant in asked)
    print(f"{len(asked) - lost} of {len(asked)} mutants were found")


if __name__ == "__main__":
    main()
