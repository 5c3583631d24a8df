"""Each framework has an example, a page, pinned requirements, tests, a place in the workflow."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

(_NAMES,) = re.findall(r"^FRAMEWORK \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
TESTED = _NAMES.split()
FRAMEWORKS = [name for name in TESTED if name != "lora"]  # its page, a how-to, holds its script
RECIPES = {"ray", "hydra"}  # that do not call DCP: their examples use our manager
CALL_DCP = [name for name in FRAMEWORKS if name not in RECIPES]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("examples/frameworks/train_*.py", FRAMEWORKS),
        ("docs/frameworks/*.md", FRAMEWORKS),
        ("requirements/frameworks/*.txt", TESTED),
        ("tests/frameworks/test_*.py", TESTED),
    ],
)
def test_each_framework_has_its_file_and_no_other_is_there(pattern: str, names: list[str]) -> None:
    expected = {ROOT / pattern.replace("*", name) for name in names}
    found = {path for path in ROOT.glob(pattern) if path.name != "index.md"}  # of all of them
    assert found == expected


def test_workflow_runs_each_framework() -> None:
    workflow = (ROOT / ".github" / "workflows" / "frameworks.yml").read_text()
    (matrix,) = re.findall(r"^ *framework: \[(.*)\]$", workflow, re.MULTILINE)
    assert matrix.split(", ") == TESTED
    assert "make test-frameworks FRAMEWORK=${{ matrix.framework }}" in workflow


@pytest.mark.parametrize("name", TESTED)
def test_requirements_are_pinned_and_so_is_torch(name: str) -> None:
    text = (ROOT / "requirements" / "frameworks" / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert [line for line in lines if not re.match(r"[\w-]+(\[\w+\])?==[\w.]+(; |$)", line)] == []


@pytest.mark.parametrize("name", CALL_DCP)
def test_example_knows_nothing_of_us(name: str) -> None:
    source = (ROOT / "examples" / "frameworks" / f"train_{name}.py").read_text()
    assert re.findall(r"torch_dcpx|\bdcpx\.\w|DCPX_", source) == []


@pytest.mark.parametrize(
    ("page", "names"), [("frameworks/index.md", CALL_DCP), ("index.md", FRAMEWORKS)]
)
def test_pages_are_linked(page: str, names: list[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    links = re.findall(r"\]\((?:frameworks/)?(\w+)\.md(?:#[\w-]+)?\)", text)
    assert set(links) >= set(names)


def test_bench_has_each_framework() -> None:
    source = (ROOT / "tests" / "bench" / "frameworks.py").read_text()
    assert set(re.findall(r'^    "(\w+)": \(', source, re.MULTILINE)) == set(CALL_DCP)
