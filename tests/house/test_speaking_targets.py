"""Every long command of the Makefile runs under requirements/speak.py."""

from __future__ import annotations

import re

from conftest import ROOT

LONG = re.compile(
    r"-m (?:pip|pytest|build|venv|mypy|ruff|mkdocs)\b|bin/pytest"
    r"|\bapt-get install|\bnpm (?:ci|pack)|setup\.py -q"
    r"|/clang-(?:format|tidy)|\$\(MAKE\) .*(?:-C|tidy\b)|wheels\.py|train_resume\.py"
    r"|bench/(?:save|load)\.py|/(?:carry|rehearse)\.sh"
)
# Under a command that speaks, or over at once.
QUIET = ("clang-tidy --quiet", "tidy=(", "-C tests/cpp clean", "'$(PYTHON) -m venv' failed")


def unspoken(makefile: str) -> list[str]:
    """Returns the recipes' commands that are long and do not begin with SPEAK or PYTEST."""
    lines = re.sub(r"\\\n\s*", " ", makefile).splitlines()
    found = []
    for line in lines:
        if line.startswith("#") or ("\t" not in line[:1] and "PYTEST =" not in line):
            continue
        spoken = re.sub(r'\$\(SPEAK\) bash -c ".*?"', "", line)
        commands = re.split(r";|&&|\|\||\bthen\b|\belse\b|\{", spoken)
        found += [
            command.strip()
            for command in commands
            if LONG.search(command)
            and not re.search(r"\$\((?:SPEAK|PYTEST)\)", command)
            and not any(word in command for word in QUIET)
            and not command.strip().startswith("echo")
        ]
    return found


def test_every_long_command_of_the_makefile_speaks() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert unspoken(makefile) == []
    assert unspoken("a:\n\t$(PY) -m pytest tests\n") == ["$(PY) -m pytest tests"]
    silent = makefile.replace("$(SPEAK) ", "")
    assert len(unspoken(silent)) > 20
