"""What DCPX_CUDA does to a build: the kernel with nvcc, none without, never a GPU asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.machine import seconds

ROOT = Path(__file__).resolve().parents[2]


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


def test_zero_leaves_the_kernel_out_where_there_is_nvcc(build: dict[str, Any], nvcc: Path) -> None:
    os.environ.update(DCPX_CUDA="0", PATH=str(nvcc.parent))
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


def test_another_value_is_refused(build: dict[str, Any]) -> None:
    os.environ["DCPX_CUDA"] = "yes"
    with pytest.raises(SystemExit, match="DCPX_CUDA=yes: expected auto, 0 or 1"):
        build["find_nvcc"]()


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
