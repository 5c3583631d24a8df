"""The pages hold together: every link leads somewhere, code compiles and uses names that exist."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
BRACKETS = str.maketrans("[]()", "____")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def prose_of(text: str) -> str:
    """Returns a page without its code."""
    return re.sub(r"`[^`\n]+`", lambda code: code[0].translate(BRACKETS), FENCE.sub("", text))


def anchors_of(text: str) -> set[str]:
    """Returns what a page's headings can be linked by, as GitHub makes it."""
    seen: Counter[str] = Counter()
    anchors = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))  # what mkdocstrings puts there
    for heading in re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", text), re.MULTILINE):
        text_alone = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text_alone.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def read(target: Path) -> str:
    """Returns the text of a page, nothing of a folder or a script."""
    return target.read_text() if target.suffix == ".md" else ""


def dead_links(page: Path, text: str) -> list[str]:
    """Returns the relative links of a page that lead to no file or heading."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_there = ROOT in target.parents and target.exists()
        wanted = {anchor} - {""}
        if not is_there or not wanted <= anchors_of(text if target == page else read(target)):
            dead.append(link)
    return dead


def test_every_link_leads_somewhere() -> None:
    dead = {str(page.relative_to(ROOT)): dead_links(page, page.read_text()) for page in PAGES}
    assert {page: links for page, links in dead.items() if links} == {}


def test_the_link_rule_itself() -> None:
    good = "[a](docs/reference/options.md#writeoptions) [b](#a-b) `x[0](1)`\n# A, b\n"
    assert dead_links(ROOT / "README.md", good) == []
    bad = "[a](docs/nowhere.md) [b](#a-1) [c](#a-2) [d](../elsewhere)\n# A\n# `a`\n"
    assert dead_links(ROOT / "README.md", bad) == ["docs/nowhere.md", "#a-2", "../elsewhere"]


def test_every_page_is_reached_from_the_readme() -> None:
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in found and page in PAGES:
            found.add(page)
            links = re.findall(r"\]\(([^)#\s]+)", prose_of(page.read_text()))
            waiting += [(page.parent / link).resolve() for link in links]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in found] == []


def test_every_file_that_the_map_names_is_there() -> None:
    named = set()
    for page in (ROOT / "ARCHITECTURE.md", ROOT / "docs" / "develop" / "decisions.md"):
        named |= set(re.findall(r"`([a-z_]+/[a-z_./]+\.(?:py|cpp|h))`", page.read_text()))
    assert len(named) > 20
    roots = (ROOT, ROOT / "torch_dcpx")
    assert [name for name in named if not any((root / name).is_file() for root in roots)] == []


def test_every_proof_that_the_page_of_tests_names_is_there() -> None:
    text = (ROOT / "docs" / "develop" / "testing.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.(?:py|cpp|c))`", text))
    assert len(named) > 120
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    targets = set(re.findall(r"`make ([\w-]+)`", text))
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets >= {"test", "test-all", "test-cpp"} and targets <= set(rules)


def test_the_goals_that_were_missed_are_those_of_the_measurements() -> None:
    measured = (ROOT / "docs" / "develop" / "measurements.md").read_text()
    goals = re.findall(r"^\| .+ \| (?:yes|\*\*(no)\*\*) \|$", measured, re.MULTILINE)
    page = (ROOT / "docs" / "develop" / "performance.md").read_text()
    assert f"We set {len(goals)} goals for saves and loads and reached {goals.count('')}." in page
    rows = page.partition("## Goals")[2].partition("\n## ")[0]
    assert rows.count("\n|") - 2 == goals.count("no")


def test_code_compiles_and_uses_names_that_exist() -> None:
    missing = []
    for page in PAGES:
        for kind, code in FENCE.findall(page.read_text()):
            if kind != "python":
                continue
            # A line of dots before an indented one stands for the loop that leads there.
            whole = re.sub(r"^\.\.\.\n(?= )", "while True:\n", code, flags=re.MULTILINE)
            compile(whole, str(page), "exec")
            names = re.findall(r"\bdcpx\.([A-Za-z]\w*)", code)
            for line in re.findall(r"^from torch_dcpx import (.+)$", code, re.MULTILINE):
                names += [name.strip() for name in line.split(",")]
            known = {*dcpx.__all__, "errors"}
            missing += [(page.name, name) for name in names if name not in known]
    assert missing == []


def test_the_glossary_is_alphabetical_and_knows_each_word_once() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    words = [word.lower() for word in re.findall(r"^- \*\*(.+?)\*\*:", text, re.MULTILINE)]
    assert words == sorted(set(words))
    assert set(words) >= {"fqn", "chunk", "shard", "replica", "planner", "item", "footer", "tag"}


# ---- Commands, their options, names, arguments ---------------------------------------------------


# CHANGELOG.md names what was there; columns of the other one are `dcpx` and `stock`.
NAMING = [page for page in PAGES if page.name not in ("CHANGELOG.md", "measurements.md")]
SOURCES = sorted(ROOT.glob("torch_dcpx/**/*.py"))
INDENTED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|[\s(`])dcpx ([a-z]+)\b([^|;&#`\n]*)", re.MULTILINE)
CALL = re.compile(r"(?:\b(?:dcpx|manager)\.|(?<![\w.]))(\w+)\(([^()]*)\)")
DOTTED = re.compile(r"\b(?:torch_)?dcpx((?:\.[A-Za-z]\w*)+)")
CLASSES = (dcpx.CheckpointManager, dcpx.SaveHandle, dcpx.LazyTensor, dcpx.OpenCheckpoint)


def code_of(path: Path) -> str:
    """Returns the code of a page, inline and in blocks; of a source the commands that it names."""
    text = path.read_text()
    if path.suffix == ".py":
        return "\n".join(re.findall(r'(?:`|example=")(dcpx [^`"\n]*)', text))
    blocks = [code for kind, code in INDENTED.findall(text) if kind in ("sh", "python")]
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", INDENTED.sub("", text))])


def unknown_options(code: str) -> Iterator[str]:
    """Yields commands, and options, that `dcpx` does not have."""
    for name, line in COMMAND.findall(code):
        command = app.commands.get(name)
        if command is None:
            yield f"dcpx {name}"
            continue
        known = {each for param in command.params for each in (*param.opts, *param.secondary_opts)}
        for option in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", line.partition(" -- ")[0]):
            if option not in known | {"--help", "-h"}:
                yield f"dcpx {name} {option}"


def unknown_names(code: str) -> Iterator[str]:
    """Yields dotted names that lead to nothing."""
    for found in DOTTED.finditer(code):
        first = getattr(dcpx, found[1].split(".")[1], None)
        # `dcpx.save.duration` is a metric.
        is_ours = found[0].startswith("torch_dcpx.") or inspect.isclass(first)
        if is_ours and not is_there(found[1][1:]):
            yield found[0]


def is_there(name: str) -> bool:
    for package in ("torch_dcpx", *(f"torch_dcpx.{each}" for each in prefixes(name))):
        try:
            reduce(getattr, name.split(".")[package.count(".") :], importlib.import_module(package))
        except dcpx.UnsupportedError:  # its framework is not installed
            source = ROOT.joinpath(*package.split(".")).with_suffix(".py").read_text()
            return package.endswith(name) or bool(
                re.search(rf"^(?:class|def) {name.split('.')[-1]}\b", source, re.MULTILINE)
            )
        except (ImportError, AttributeError):
            continue
        return True
    return False


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def unknown_arguments(code: str) -> Iterator[str]:
    """Yields keywords of public calls that these do not take."""
    for name, given in CALL.findall(code):
        owners = [dcpx, *CLASSES] if name in dcpx.__all__ else CLASSES
        takers = [getattr(each, name) for each in owners if hasattr(each, name)]
        known = [parameters(each) for each in takers if callable(each)]
        for keyword in re.findall(r"(?:^|, *)(\w+)=(?!=)", given):
            if known and not any(keyword in each for each in known):
                yield f"{name}({keyword}=)"


def parameters(taker: Any) -> set[str]:
    return set(inspect.signature(taker).parameters)


def test_commands_and_names_that_a_text_gives_are_there() -> None:
    wrong = {}
    for path in (*NAMING, *SOURCES):
        code = code_of(path)
        found = [*unknown_options(code)]
        if path.suffix == ".md":
            found += [*unknown_names(code), *unknown_arguments(code)]
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


def test_the_rule_of_names_itself() -> None:
    for text, wrong in {
        "dcpx ls ckpt --newest --max-age 1h || mail -s": [],
        "dcpx run -- python train.py --lr 1": [],
        "dcpx lss ckpt\ndcpx verify ckpt --newst": ["dcpx lss", "dcpx verify --newst"],
        "torch_dcpx.lss dcpx.PerRank.cls": ["torch_dcpx.lss", "dcpx.PerRank.cls"],
        "torch.load(f, weights_only=True) manager.save(1, modl=m)": ["save(modl=)"],
    }.items():
        assert [*unknown_options(text), *unknown_names(text), *unknown_arguments(text)] == wrong
