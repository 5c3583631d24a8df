"""What a build says, and what the next one need not compile."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.build_fixture import ROOT


def test_lines_of_ninja_name_the_source_and_others_stay(
    build: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    with build["short_lines"]():
        print("[1/9] from Python")
        sys.stdout.flush()
        line = f"[17/69] c++ -MMD -MF a.o.d -I{ROOT}/csrc -c {ROOT}/csrc/io/a.cpp -o a.o -O3\n"
        os.write(1, line.encode() + b"a.cpp:3: warning: unused\nno end of line")
    print("behind")
    assert capfd.readouterr().out == (
        "[1/9] from Python\n[17/69] csrc/io/a.cpp\na.cpp:3: warning: unused\nno end of linebehind\n"
    )


def test_joined_sources_are_written_once(build: dict[str, Any], tmp_path: Path) -> None:
    sources = [f"csrc/bind/{name}.cpp" for name in ("a", "b", "c")]
    paths = [Path(path) for path in build["joined_sources"](sources, str(tmp_path))]
    for path in paths:
        os.utime(path, ns=(1, 1))
    build["joined_sources"](sources, str(tmp_path))
    assert {path.stat().st_mtime_ns for path in paths} == {1}
    build["joined_sources"]([*sources, "csrc/bind/d.cpp"], str(tmp_path))
    assert [path.stat().st_mtime_ns == 1 for path in paths] == [True, False, True, True]


def test_an_editable_install_compiles_where_the_build_in_place_does(build: dict[str, Any]) -> None:
    from setuptools import Distribution

    folders = []
    for is_editable in (False, True):
        command = build["BuildExt"](Distribution())
        command.editable_mode = is_editable
        if is_editable:
            command.distribution.get_command_obj("build").build_temp = "/a/folder/of/pip"
        command.finalize_options()
        folders.append(command.build_temp)
    assert folders[0].startswith("build/temp.")
    assert folders[0] == folders[1]
