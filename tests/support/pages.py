"""The code blocks of a page, read by the conventions of CONTRIBUTING.md ("Pages").

    <!-- test: setup          hidden set-up: Python that runs at this place
    code
    -->

    <!-- test: not run: Slurm is not on this machine -->      of the block below: compiled only

A block whose first line is a comment with a file's name (`# train.py`) is written to that file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("page_runner.py")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

# Languages of blocks that run, that are parsed, and that a reader alone reads.
RUN = {"python", "sh"}
PARSED = {"json", "yaml", "toml"}
SHOWN = {"text", "console", "mermaid", "c", "cpp"}

_FENCE = re.compile(r"^( *)(`{3,})(\S*)")
_FILE = re.compile(r"# ([\w./-]+\.(?:py|sh|json|ya?ml|toml))\n")
_LOOP_OF_DOTS = re.compile(r"^\.\.\.\n(?= )", re.MULTILINE)  # stands for the loop that leads there


class PageError(Exception):
    """A block that the conventions do not know. Its message begins with page and line."""


@dataclass(frozen=True)
class Block:
    """One block: `line` is that of its first line of code, counted from 1."""

    page: str
    line: int
    language: str
    code: str
    not_run: str = ""  # the reason

    @property
    def file(self) -> str:
        """The file that the block is written to; "": none."""
        found = _FILE.match(self.code)
        return found[1] if found and self.language in RUN | PARSED else ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str = "page.md") -> list[Block]:
    """Returns the blocks and the hidden set-up of a page in their order."""
    found, lines, at, reason = [], text.splitlines(), 0, ""
    while at < len(lines):
        line = lines[at]
        comment = re.match(r" *<!-- test: (\w[^:]*?)(?:: (.*?))? *(-->)?$", line)
        fence = _FENCE.match(line)
        if comment and comment[1] == "not run" and comment[2] and comment[3]:
            reason = comment[2]
        elif comment and comment[1] == "setup" and not comment[3]:
            end = _find(lines, at, r" *-->$", page)
            found.append(_block(page, lines, at, end, "python", ""))
            at = end
        elif comment or "<!-- test" in line:
            raise PageError(f"{page}:{at + 1}: no such convention: {line.strip()}")
        elif fence:
            end = _find(lines, at, rf" *{fence[2]} *$", page)
            if fence[3] not in RUN | PARSED | SHOWN:
                raise PageError(f"{page}:{at + 1}: a block in {fence[3] or 'no language'}")
            found.append(_block(page, lines, at, end, fence[3], reason))
            at, reason = end, ""
        elif line.strip() and reason:
            raise PageError(f"{page}:{at + 1}: 'not run' stands right above its block")
        at += 1
    return found


def _find(lines: list[str], start: int, end: str, page: str) -> int:
    for at in range(start + 1, len(lines)):
        if re.match(end, lines[at]):
            return at
    raise PageError(f"{page}:{start + 1}: a block without an end")


def _block(page: str, lines: list[str], start: int, end: int, language: str, reason: str) -> Block:
    code = textwrap.dedent("\n".join(lines[start + 1 : end]) + "\n")
    return Block(page, start + 2, language, code, reason)


def parse(block: Block) -> None:
    """Compiles or parses a block, whether it runs or not. Raises PageError."""
    try:
        if block.language == "python":
            code = _LOOP_OF_DOTS.sub("while True:\n", block.code)
            compile(code, block.page, "exec")
        elif block.language == "sh":
            subprocess.run(
                ["bash", "-n"], input=block.code, text=True, capture_output=True, check=True
            )
        elif block.language == "json":
            json.loads(block.code)
        elif block.language == "yaml":
            yaml.safe_load(block.code)
        elif block.language == "toml":
            _toml(block.code)
    except (ValueError, SyntaxError, yaml.YAMLError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise PageError(f"{block.place}: {block.language}: {said}") from error


def _toml(text: str) -> None:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    tomllib.loads(text)


def is_slow(blocks: list[Block]) -> bool:
    """Returns whether a page starts ranks."""
    return any(block.language == "sh" and "torchrun" in block.code for block in steps_of(blocks))


def steps_of(blocks: list[Block]) -> list[Block]:
    """Returns the blocks that run or are written to files."""
    return [b for b in blocks if not b.not_run and (b.language in RUN or b.file)]


def write_steps(blocks: list[Block], path: Path) -> Path:
    """Writes what page_runner.py is to do; returns `path`."""
    steps = [{**asdict(b), "file": b.file, "page": str(ROOT / b.page)} for b in steps_of(blocks)]
    path.write_text(json.dumps(steps))
    return path


def environment_of_page(home: Path, commands: str) -> dict[str, str]:
    """Returns the environment of a page's commands: `commands` are folders of them, for PATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DCPX_")}
    home.mkdir()
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{commands}:{kept['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
