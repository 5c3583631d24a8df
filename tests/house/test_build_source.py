"""setup.py: what a build needs, says and makes, with and without nvcc."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from support.build_fixture import ROOT
from support.machine import seconds


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


# Variable, the function that reads it, values that it does not take.
REFUSED = {
    "MAX_JOBS": ("jobs", ("0", "-1", "four", " ", "2.5")),
    "DCPX_CUDA": ("find_nvcc", ("yes",)),
    "DCPX_TARGET": ("target", (
        "x86_64", "x86_64-linux-gnu", "x86_64-linux-musl", "riscv64-linux-gnu.2.28",
        "aarch64-linux-gnu.2.28.1", "x86_64-linux-gnu.2.28 ",
    )),
}  # fmt: skip


def test_values_that_variables_do_not_take(build: dict[str, Any]) -> None:
    for name, (function, values) in REFUSED.items():
        for value in values:
            os.environ[name] = value
            assert line_of(build[function]).startswith(f"{name}={value}: ")


def test_another_system_machine_or_libc(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build["check_platform"]()
    musl = {
        "SOABI": "cpython-312-x86_64-linux-musl",
        "HOST_GNU_TYPE": "x86_64-alpine-linux-musl",
        "MULTIARCH": None,
    }
    with monkeypatch.context() as of_alpine:
        of_alpine.setattr(sysconfig, "get_config_vars", lambda *names: [musl[n] for n in names])
        assert "this Python is of musl (Alpine)" in line_of(build["check_platform"])
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert line_of(build["check_platform"]).endswith("this is linux on riscv64")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert line_of(build["check_platform"]).endswith("this is darwin on x86_64")


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


def test_headers_that_only_name_others(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    os.environ["DCPX_TARGET"] = "x86_64-linux-gnu.2.28"
    (tmp_path / "Python.h").touch()
    (tmp_path / "pyconfig.h").write_text("#include <x86_64-linux-gnu/python3.11/pyconfig.h>")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert "has those of Debian, which only name others" in line_of(build["check_headers"])


def test_packages_that_are_missing_and_a_sanitizer_for_others(
    build: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "needs the headers of pybind11" in line_of(lambda: build["pybind11_include"]("x"))
    os.environ["DCPX_TARGET"] = "aarch64-linux-gnu.2.28"
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


# ---- What a build says, and what the next one need not compile -----------------------------------


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


# ---- The kernel: with nvcc, none without, never a GPU asked --------------------------------------


def calls(nvcc: Path) -> list[str]:
    return (nvcc.parent / "calls").read_text().splitlines()


def use_system_tools(path: Path) -> None:
    os.environ["PATH"] = f"{path}:/usr/bin:/bin"


@pytest.mark.parametrize("value", ["", "auto"])
def test_auto_takes_nvcc_of_the_named_toolkit_then_of_path_and_works_without(
    build: dict[str, Any], nvcc: Path, value: str
) -> None:
    os.environ["DCPX_CUDA"] = value
    assert build["find_nvcc"]() is None
    os.environ["PATH"] = str(nvcc.parent)
    assert build["find_nvcc"]() == str(nvcc)
    os.environ["CUDA_PATH"] = "/no/such/toolkit"
    assert build["find_nvcc"]() == str(nvcc)
    os.environ["PATH"] = "/no/such/place"
    os.environ["CUDA_HOME"] = str(nvcc.parents[1])
    assert build["find_nvcc"]() == str(nvcc)
    os.environ["DCPX_CUDA"] = "0"
    assert build["find_nvcc"]() is None


@pytest.mark.slow
def test_one_without_nvcc_ends_the_build_and_says_where_it_was_looked_for(tmp_path: Path) -> None:
    env = {"PATH": "/no/such/place", "CUDA_HOME": "/no/such/toolkit", "DCPX_CUDA": "1"}
    folders = ["--build-temp", str(tmp_path / "t"), "--build-lib", str(tmp_path / "l")]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )
    assert done.returncode != 0
    assert "no nvcc was found in /no/such/toolkit/bin, PATH" in done.stderr
    assert "DCPX_CUDA=0" in done.stderr


BROKEN = [
    ("#!/bin/sh\necho 'unsupported GNU version' >&2\nexit 3\n", "(3):\nunsupported GNU version"),
    ("#!/bin/sh\necho sm_35 sm_50\n", "serves none of sm_(75, "),
    ("#!/no/such/shell\n", "does not run"),
]


@pytest.mark.parametrize(("script", "text"), BROKEN)
def test_nvcc_that_fails_ends_a_build_that_must_have_the_kernel_and_is_a_warning_in_auto(
    build: dict[str, Any],
    nvcc: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    script: str,
    text: str,
) -> None:
    use_system_tools(nvcc.parent)
    nvcc.write_text(script)
    assert build["optional_kernel"](str(tmp_path / "build")) == []
    assert text in capfd.readouterr().err
    os.environ["DCPX_CUDA"] = "1"
    with pytest.raises(SystemExit) as caught:
        build["optional_kernel"](str(tmp_path / "build"))
    assert text in str(caught.value) and "DCPX_CUDA=0" in str(caught.value)


def test_kernel_is_compiled_for_the_known_devices_that_nvcc_serves(
    build: dict[str, Any], nvcc: Path, tmp_path: Path
) -> None:
    use_system_tools(nvcc.parent)
    build["kernel_source"](str(nvcc), str(tmp_path / "build"))
    (compiled,) = [call for call in calls(nvcc) if call.startswith("-fatbin")]
    codes = [word.split(",code=")[1] for word in compiled.split() if ",code=" in word]
    assert codes == ["sm_75", "sm_90", "compute_75"]
    assert "csrc/device/pack.cu" in compiled
    assert any("cuda_abi_check.cpp" in call and "-DDCPX_CHECK_ABI" in call for call in calls(nvcc))


def test_kernel_is_compiled_anew_only_for_another_nvcc_and_is_the_same_file_each_time(
    build: dict[str, Any], nvcc: Path, tmp_path: Path
) -> None:
    use_system_tools(nvcc.parent)

    def compiled(folder: str) -> tuple[str, int]:
        path = build["kernel_source"](str(nvcc), str(tmp_path / folder))
        fatbins = sum(call.startswith("-fatbin") for call in calls(nvcc))
        return Path(path).read_text(), fatbins

    first, count = compiled("a")
    assert count == 1
    assert compiled("a") == (first, 1)
    assert compiled("b") == (first, 2)
    assert "0x616d6920ba55ed50,0x6567" in first  # little-endian words, filled up with zeros
    (nvcc.parent / "release").write_text("13.1")
    other, count = compiled("a")
    assert count == 3
    assert other != first


def test_sources_of_the_kernel_are_in_the_source_distribution() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text()
    assert "recursive-include csrc *.h *.cpp *.cu *.map" in manifest
    assert (ROOT / "csrc" / "device" / "pack.cu").is_file()
