"""Each framework has an example, a page, pinned requirements, tests, a place in the workflow."""

from __future__ import annotations

import re

from conftest import ROOT

(_NAMES,) = re.findall(r"^FRAMEWORK \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
TESTED = _NAMES.split()
FRAMEWORKS = [name for name in TESTED if name != "lora"]  # its page, a how-to, holds its script
RECIPES = {"ray", "hydra"}  # that do not call DCP: their examples use our manager
CALL_DCP = [name for name in FRAMEWORKS if name not in RECIPES]


def test_each_framework_has_its_files_and_no_other_is_there() -> None:
    for pattern, names in (
        ("examples/frameworks/train_*.py", FRAMEWORKS),
        ("docs/frameworks/*.md", FRAMEWORKS),
        ("requirements/frameworks/*.txt", TESTED),
        ("tests/frameworks/test_*.py", TESTED),
    ):
        expected = {ROOT / pattern.replace("*", name) for name in names}
        assert {path for path in ROOT.glob(pattern) if path.name != "index.md"} == expected


def test_workflow_runs_each_framework() -> None:
    workflow = (ROOT / ".github" / "workflows" / "frameworks.yml").read_text()
    (matrix,) = re.findall(r"^ *framework: \[(.*)\]$", workflow, re.MULTILINE)
    assert matrix.split(", ") == TESTED
    assert "make test-frameworks FRAMEWORK=${{ matrix.framework }}" in workflow


def test_requirements_are_pinned_and_so_is_torch() -> None:
    pinned = re.compile(r"[\w-]+(\[\w+\])?==[\w.]+(; |$)")
    for name in TESTED:
        text = (ROOT / "requirements" / "frameworks" / f"{name}.txt").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert "torch==2.13.0" in lines, name
        assert [line for line in lines if not pinned.match(line)] == []


def test_example_knows_nothing_of_us() -> None:
    for name in CALL_DCP:
        source = (ROOT / "examples" / "frameworks" / f"train_{name}.py").read_text()
        assert re.findall(r"torch_dcpx|\bdcpx\.\w|DCPX_", source) == [], name


def test_pages_are_linked() -> None:
    for page, names in (("frameworks/index.md", CALL_DCP), ("index.md", FRAMEWORKS)):
        text = (ROOT / "docs" / page).read_text()
        links = re.findall(r"\]\((?:frameworks/)?(\w+)\.md(?:#[\w-]+)?\)", text)
        assert set(links) >= set(names)


def test_bench_has_each_framework() -> None:
    source = (ROOT / "tests" / "bench" / "frameworks.py").read_text()
    assert set(re.findall(r'^    "(\w+)": \(', source, re.MULTILINE)) == set(CALL_DCP)
