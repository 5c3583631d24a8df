"""docs/reference says what the code says: options, variables, commands, every public name."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch_dcpx as dcpx
from torch_dcpx._environment import variable_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"


def _generator() -> ModuleType:
    path = ROOT / "docs" / "_tools" / "reference.py"
    spec = importlib.util.spec_from_file_location("_reference_pages", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _generator()
OPTIONS = {name: getattr(dcpx, name) for name in reference.OPTIONS}
CALLS = {**OPTIONS, **dict(reference.calls())}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def test_generated_pages_are_those_of_this_code() -> None:
    wanted = reference.pages()
    stale = [name for name, text in wanted.items() if (FOLDER / name).read_text() != text]
    assert stale == [], "run `make reference`"
    marked = {p for p in FOLDER.rglob("*.md") if p.read_text().startswith(reference.MARK)}
    assert marked == {FOLDER / name for name in wanted}


def test_each_public_name_is_on_one_page_of_the_api() -> None:
    text = "".join(path.read_text() for path in (FOLDER / "api").glob("*.md"))
    named = re.findall(r"^::: torch_dcpx\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(set(dcpx.__all__) - {"__version__"})


def test_each_adapter_is_on_the_page_of_adapters() -> None:
    found = {}
    for path in sorted((ROOT / "torch_dcpx" / "integrations").glob("[a-z]*.py")):
        found[path.stem] = re.findall(
            r"^(?:class|def) ([A-Za-z]\w*)", path.read_text(), re.MULTILINE
        )
    assert {name: sorted(classes) for name, classes in reference.ADAPTERS.items()} == {
        name: sorted(classes) for name, classes in found.items()
    }


# ---- Options ------------------------------------------------------------------------------------


def test_every_argument_has_a_meaning_and_states_no_other_default() -> None:
    for name, call in CALLS.items():
        meanings = reference.meanings_of(call)
        for parameter in reference.parameters_of(call):
            assert meanings.get(parameter.name), (name, parameter.name)
            stated = default_stated(meanings[parameter.name])
            if stated is not ABSENT:
                assert stated == said(parameter.default), (name, parameter.name)
            else:
                assert name not in OPTIONS, f"{name}: {parameter.name} states no default"


def test_an_option_with_a_unit_names_it() -> None:
    for option in OPTIONS.values():
        for parameter, meaning in reference.meanings_of(option).items():
            for ending, word in {"_bytes": "bytes", "_s": "seconds"}.items():
                assert not parameter.endswith(ending) or f"in {word}" in meaning, parameter


ABSENT = object()
_VALUE = r'(?:None|True|False|\(\)|"\w+"|[\d,.]*\d(?: [KMG]iB)?|\([^)]*\)|[A-Z_]+)'
_DEFAULT = re.compile(rf"\b[Dd]efault ({_VALUE})|({_VALUE}) \(default\)")


def default_stated(text: str) -> Any:
    """Returns the default that a docstring states, as `said` returns it; ABSENT: none."""
    found = _DEFAULT.search(text)
    if not found:
        return ABSENT
    value = found[1] or found[2]
    if value[0] == "(":
        return value
    number, _, unit = value.partition(" ")
    return str(int(number) * UNITS[unit]) if unit else value.strip('"').replace(",", "")


def said(default: Any) -> str:
    """Returns a default as `default_stated` does."""
    if isinstance(default, float):
        return f"{default:g}"
    return getattr(default, "name", None) or str(default)


def test_the_rule_of_defaults_itself() -> None:
    for text, stated in {
        "bytes. Default 2 MiB.": str(2 << 20),
        '"full" (default): durable. "none": not.': "full",
        "Default 10,000,000.": "10000000",
        "Default (0, 1).": "(0, 1)",
        "the rank": ABSENT,
    }.items():
        assert default_stated(text) == stated


# ---- Variables ----------------------------------------------------------------------------------


def test_every_variable_that_the_code_reads_is_on_the_page() -> None:
    page = (FOLDER / "environment.md").read_text()
    for cls in OPTIONS.values():
        for field in dataclasses.fields(cls):
            assert f"| `{variable_of(field.name)}` |" in page
    read = set()
    for path in [ROOT / "setup.py", *(ROOT / "torch_dcpx").rglob("*.py")]:
        text = path.read_text()
        read |= set(re.findall(r'"(DCPX_[A-Z_]+)"', text))
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text))
    for path in (ROOT / "csrc").rglob("*.cpp"):
        read |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text()))
    assert len(read) > 8
    foreign = {"CXX", "PATH", "WORLD_SIZE", "NO_COLOR", "TERM"}  # not ours to document
    assert "| `AWS_*`, `AZURE_*` |" in page  # obstore's, in one row
    own = {name for name in read - foreign if not name.startswith(("AWS_", "AZURE_"))}
    assert [name for name in sorted(own) if f"`{name}`" not in page] == []


def test_every_option_of_every_command_is_on_the_page() -> None:
    from torch_dcpx.cli.app import app

    page = (FOLDER / "cli.md").read_text()
    for name, command in app.commands.items():
        assert f"## `dcpx {name}`" in page
        for parameter in command.params:
            is_shown = parameter.param_type_name == "option" and not parameter.hidden
            for option in parameter.opts if is_shown else ():
                assert option in page
        assert inspect.getdoc(command.callback)
