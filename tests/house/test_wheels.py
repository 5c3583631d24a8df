"""Wheels of a release: what no wheel may have, and one commit gives the same bytes each time."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from support.machine import seconds

ROOT = Path(__file__).resolve().parents[2]
HERE = platform.machine()
OTHER = "aarch64" if HERE == "x86_64" else "x86_64"
TAG = f"cp311-cp311-manylinux_2_28_{HERE}"

# Two symbols, one of C++'s runtime, one that no library has, and a folder's name.
BAD_CODE = """
#include <string>
extern "C" int cudaMalloc();
std::string text(const char* from) { return std::string(from); }
extern "C" int PyInit__C() { return text("FOLDER").empty() ? 0 : cudaMalloc(); }
"""
GOOD_CODE = """
extern "C" int _Unwind_Backtrace(int);
extern "C" const char* PyInit__C() { return _Unwind_Backtrace(0) ? "" : "P\\355U\\272"; }
"""


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "requirements" / "wheels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel_of(folder: Path, binary: bytes, tag: str = TAG, **others: bytes) -> Path:
    path = folder / f"torch_dcpx-1-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch_dcpx-1.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        archive.writestr(f"torch_dcpx/_C.cpython-311-{HERE}-linux-gnu.so", binary)
        for name, data in others.items():
            archive.writestr(name, data)
    return path


def compiled(folder: Path, code: str, *flags: str) -> bytes:
    """A shared library of the system's compiler."""
    (folder / "code.cpp").write_text(code)
    command = ["c++", "-shared", "-fPIC", "code.cpp", *flags, "-o", "code.so"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "code.so").read_bytes()


def test_all_that_is_wrong_with_a_wheel_is_said(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = BAD_CODE.replace("FOLDER", str(tmp_path))
    flags = ["-g", "-static-libgcc", "-Wl,-rpath,/a/place", "-Wl,-z,execstack"]
    binary = compiled(tmp_path, code, *flags)
    monkeypatch.setattr(wheels, "GLIBC", (2, 1))  # older than any that a compiler links with
    monkeypatch.setattr(wheels, "MAX_BYTES", 100)
    wheel = wheel_of(tmp_path, binary, f"cp311-cp311-linux_{HERE}", more=binary)
    said = wheels.audit(wheel, "3.12", OTHER, [str(tmp_path)])
    wanted = [
        rf"the name ends otherwise than in cp312-cp312-manylinux_2_1_{OTHER}",
        r"\d+ bytes, more than 100",
        r"WHEEL has another tag than cp312-.*",
        *[rf"(torch_dcpx/_C\S+|more) names {re.escape(str(tmp_path))}"] * 2,
        r"the binaries are \['torch_dcpx/_C\.cpython-311-.*', 'more'\], and not torch_dcpx/.*",
        *[
            r"\S+ is of EM_\w+",
            r"\S+ needs \['libstdc\+\+\.so\.6'\]",
            r"\S+ does not use the system's unwinder",
            r"\S+ has a path to libraries",
            r"\S+ has code that can be written to",
            r"\S+ exports \d+ symbols: .*",
            r"\S+ needs cudaMalloc of nobody",
            r"\S+ needs GLIBC_2\.\d+.*",
            r"\S+ has debug information",
            r"\S+ has no pack kernel",
        ]
        * 2,
    ]
    assert len(said) == len(wanted), said
    assert [
        line for line, form in zip(said, wanted, strict=True) if not re.fullmatch(form, line)
    ] == []


def test_a_wheel_as_it_should_be_has_no_complaint(wheels: ModuleType, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, compiled(tmp_path, GOOD_CODE, "-s", "-nostdlib", "-lgcc_s"))
    assert wheels.audit(wheel, "3.11", HERE, [str(tmp_path)]) == []


def test_no_text_tells_to_install_a_name_that_no_index_has() -> None:
    """README alone names it, as what will be; RELEASING.md says what changes then."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    texts += (ROOT / "torch_dcpx").rglob("*.py")
    named = re.compile(r"(?<!will be `)pip install [^`\n]*\btorch[-_]dcpx\b(?!_C|-\*)")
    found = [
        (path.name, line)
        for path in texts
        if path.is_file()
        for line in named.findall(path.read_text(errors="ignore"))
        if "/torch_dcpx-" not in line
    ]
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(2100)  # two builds, each with its own limit
def test_two_builds_of_one_commit_are_equal_bytes(tmp_path: Path, nvcc: Path) -> None:
    """In two folders, under two umasks; the audit of `make wheels` is part of each."""
    probe = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", "probe", "ziglang"]
    done = subprocess.run(probe, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"pip reaches no package index: {done.stderr.strip().splitlines()[-1]}")
    left_out = [".*_cache", ".hypothesis", "__pycache__", ".git", ".venv*", "build", "dist"]
    ignore = shutil.ignore_patterns(*left_out, "*.so", "*.egg-info")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=ignore)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    env = {**os.environ} if shutil.which("nvcc") else {**os.environ, "CUDA_HOME": str(nvcc)}
    env.pop("DCPX_SANITIZE", None)
    built = []
    for folder, umask in (("a", 0o022), ("another", 0o077)):
        arguments = f"--pythons {sys.executable} --machines {HERE}"
        work = f"--work {tmp_path / folder / 'work'} --out {tmp_path / folder / 'out'}"
        made = subprocess.run(
            ["make", "wheels", f"PYTHON={sys.executable}", f"WHEEL_ARGS={arguments} {work}"],
            cwd=source,
            env=env,
            umask=umask,
            capture_output=True,
            text=True,
            timeout=seconds(1000),
        )
        assert made.returncode == 0, made.stdout + made.stderr
        (wheel,) = (tmp_path / folder / "out").glob("*.whl")
        assert wheel.name in (wheel.parent / "SHA256SUMS").read_text()
        built.append((wheel.name, wheel.read_bytes()))
    assert built[0] == built[1]


def test_only_numbered_versions_of_glibc_up_to_that_of_the_tag_are_served(
    wheels: ModuleType,
) -> None:
    names = ["GLIBC_2.2.5", "GLIBC_2.28", "GLIBC_2.29", "GLIBC_2.34", "GLIBC_ABI_DT_RELR"]
    assert [name for name in names if wheels._is_served(name)] == names[:2]


def test_tools_are_pinned() -> None:
    lines = (ROOT / "requirements" / "wheels.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[\w-]+==[\d.]+", line)] == []
