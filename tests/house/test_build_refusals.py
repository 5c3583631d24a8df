"""What a build cannot be made with ends it by one line that says what to do."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest


def line_of(function: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        function()
    (line,) = str(caught.value).splitlines()
    return line


def test_python_before_the_oldest_that_is_served(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build["check_python"]()
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    monkeypatch.setattr(platform, "python_version", lambda: "3.9.18")
    line = line_of(build["check_python"])
    assert line == "torch-dcpx needs Python 3.10 or newer, and this is 3.9.18"


def test_another_system_or_machine(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    build["check_platform"]()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert line_of(build["check_platform"]).endswith("this is linux on riscv64")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert line_of(build["check_platform"]).endswith("this is darwin on x86_64")


def test_python_of_musl(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    of_alpine = {
        "SOABI": "cpython-312-x86_64-linux-musl",
        "HOST_GNU_TYPE": "x86_64-alpine-linux-musl",
        "MULTIARCH": None,
    }
    monkeypatch.setattr(sysconfig, "get_config_vars", lambda *names: [of_alpine[n] for n in names])
    assert "this Python is of musl (Alpine)" in line_of(build["check_platform"])


def test_headers_of_python(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    line = line_of(build["check_headers"])
    assert f"{tmp_path} has no Python.h: apt install python3." in line


def test_compiler(build: dict[str, Any], tmp_path: Path) -> None:
    assert "there is no c++: apt install g++" in line_of(build["check_headers"])
    own = tmp_path / "own c++"
    own.touch(mode=0o755)
    os.environ["CXX"] = f'"{own}" -pipe'
    build["check_headers"]()


@pytest.mark.parametrize("value", ["0", "-1", "four", " ", "2.5"])
def test_number_of_compilers(build: dict[str, Any], value: str) -> None:
    os.environ["MAX_JOBS"] = value
    line = line_of(build["jobs"])
    assert line == f"MAX_JOBS={value}: expected a number of compiler processes, 1 or more"


def test_headers_that_only_name_others(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    os.environ["DCPX_TARGET"] = "x86_64-linux-gnu.2.28"
    (tmp_path / "Python.h").touch()
    (tmp_path / "pyconfig.h").write_text("#include <x86_64-linux-gnu/python3.11/pyconfig.h>")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert "has those of Debian, which only name others" in line_of(build["check_headers"])


def test_headers_of_pybind11(build: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert line_of(lambda: build["pybind11_include"]("x")).startswith(
        "torch-dcpx needs the headers of pybind11 to build"
    )


@pytest.mark.parametrize("value", [
    "x86_64", "x86_64-linux-gnu", "x86_64-linux-musl", "riscv64-linux-gnu.2.28",
    "aarch64-linux-gnu.2.28.1", "x86_64-linux-gnu.2.28 ",
])  # fmt: skip
def test_target_that_no_wheel_is_made_for(build: dict[str, Any], value: str) -> None:
    os.environ["DCPX_TARGET"] = value
    line = line_of(build["target"])
    assert line == f"DCPX_TARGET={value}: expected x86_64 or aarch64-linux-gnu.GLIBC"


def test_target_without_its_compiler_or_with_a_sanitizer(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ["DCPX_TARGET"] = "aarch64-linux-gnu.2.28"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert line_of(build["target"]).endswith("needs the package ziglang: pip install ziglang")
    os.environ["DCPX_SANITIZE"] = "thread"
    assert "a wheel for others has no sanitizer" in line_of(build["compile_flags"])


def test_target_names_the_wheel_and_needs_no_compiler_of_the_system(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (build["target"](), build["options"]()) == (None, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    os.environ["DCPX_TARGET"] = "aarch64-linux-gnu.2.28"
    assert build["target"]() == ("aarch64", "2.28")
    assert build["options"]() == {
        "bdist_wheel": {"plat_name": "manylinux_2_28_aarch64"},
        "build": {"build_base": "build/manylinux_2_28_aarch64"},
    }
    assert shutil.which("c++") is None
    build["check_headers"]()


def test_joined_sources_are_each_source_once(build: dict[str, Any], tmp_path: Path) -> None:
    sources = [str(path) for path in sorted(Path("csrc").rglob("*.cpp"))]
    joined = build["joined_sources"](sources, str(tmp_path))
    held = []
    for path in map(Path, joined):
        if path.is_relative_to("csrc"):
            held.append(str(path))
        else:
            held += [f"csrc/{line.split(chr(34))[1]}" for line in path.read_text().splitlines()]
    assert sorted(held) == sources
    assert len(joined) < len(sources) - 20
