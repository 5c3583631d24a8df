"""What pages and messages name is there: commands and their options, names, arguments."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import torch_dcpx as dcpx
from torch_dcpx.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
PAGES.remove(ROOT / "docs/develop/measurements.md")  # its columns are `dcpx` and `stock`
PAGES.remove(ROOT / "CHANGELOG.md")  # it names what was there
SOURCES = sorted(ROOT.glob("torch_dcpx/**/*.py"))
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|[\s(`])dcpx ([a-z]+)\b([^|;&#`\n]*)", re.MULTILINE)
CALL = re.compile(r"(?:\b(?:dcpx|manager)\.|(?<![\w.]))(\w+)\(([^()]*)\)")
DOTTED = re.compile(r"\b(?:torch_)?dcpx((?:\.[A-Za-z]\w*)+)")
CLASSES = (dcpx.CheckpointManager, dcpx.SaveHandle, dcpx.LazyTensor, dcpx.OpenCheckpoint)


def code_of(path: Path) -> str:
    """Returns the code of a page, inline and in blocks; of a source the commands that it names."""
    text = path.read_text()
    if path.suffix == ".py":
        return "\n".join(re.findall(r'(?:`|example=")(dcpx [^`"\n]*)', text))
    blocks = [code for kind, code in FENCE.findall(text) if kind in ("sh", "python")]
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))])


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
    for path in (*PAGES, *SOURCES):
        code = code_of(path)
        found = [*unknown_options(code)]
        if path.suffix == ".md":
            found += [*unknown_names(code), *unknown_arguments(code)]
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("dcpx ls ckpt --newest --max-age 1h || mail -s", []),
        ("dcpx run -- python train.py --lr 1", []),
        ("dcpx lss ckpt", ["dcpx lss"]),
        ("# then\ndcpx verify ckpt --newst", ["dcpx verify --newst"]),
        ("torch_dcpx.integrations.trainer:DcpxCallback", []),
        ("torch_dcpx.lss dcpx.PerRank.cls", ["torch_dcpx.lss", "dcpx.PerRank.cls"]),
        ("torch.load(f, weights_only=True) manager.save(1, model=m)", []),
        ("CheckpointManager(keep_lst=3) manager.save(1, modl=m)",
         ["CheckpointManager(keep_lst=)", "save(modl=)"]),
    ],
)  # fmt: skip
def test_the_rule_of_names_itself(text: str, wrong: list[str]) -> None:
    assert [*unknown_options(text), *unknown_names(text), *unknown_arguments(text)] == wrong
