"""What the build makes: one module that needs no torch, exports one symbol, and fails loudly."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import RunPython
from support.machine import seconds

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_LIBRARIES = re.compile(
    r"^(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux-(x86-64|aarch64))\.so\.\d+$"
)

needs_binutils = pytest.mark.skipif(
    shutil.which("readelf") is None, reason="no readelf (package binutils)"
)
not_sanitized = pytest.mark.skipif(
    bool(os.environ.get("DCPX_SANITIZE")), reason="a sanitized build links its runtime"
)


def extension_file() -> Path:
    spec = importlib.util.find_spec("torch_dcpx._C")
    assert spec is not None and spec.origin is not None, "torch_dcpx._C is not built"
    return Path(spec.origin)


def readelf(option: str, path: Path) -> str:
    command = ["readelf", "--wide", option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def copy_of_package(target: Path) -> Path:
    """Copies torch_dcpx without its extension into `target`; returns the copy."""
    assert importlib.util.find_spec("torch_dcpx") is not None
    package = extension_file().parent
    ignore = shutil.ignore_patterns("_C.*.so", "__pycache__")
    return Path(shutil.copytree(package, target / "torch_dcpx", ignore=ignore))


# ---- The binary ---------------------------------------------------------------------------------


@needs_binutils
@not_sanitized
def test_extension_needs_only_the_systems_libraries() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", extension_file()))
    assert "libc.so.6" in needed
    assert [name for name in needed if not ALLOWED_LIBRARIES.match(name)] == []


@needs_binutils
def test_extension_exports_its_entry_point_and_nothing_else() -> None:
    rows = [line.split() for line in readelf("--dyn-syms", extension_file()).splitlines()]
    symbols = [row for row in rows if len(row) >= 8 and row[0].rstrip(":").isdigit()]
    exported = [row[7] for row in symbols if row[6] != "UND"]
    assert exported == ["PyInit__C"]


@needs_binutils
@not_sanitized
def test_extension_asks_torch_for_no_symbol() -> None:
    table = readelf("--dyn-syms", extension_file())
    assert re.findall(r"\b_ZNK?(?:2at|3c10|5torch)\w+|\bcuda\w+|\bcu[A-Z]\w+", table) == []


# ---- Import -------------------------------------------------------------------------------------

# Imports torch_dcpx from argv[1] alone: the finder of an editable install would fill its gaps.
IMPORT_THE_COPY = """
import sys
sys.path.insert(0, sys.argv[1])
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import torch_dcpx
assert torch_dcpx.__file__.startswith(sys.argv[1])
"""


def test_import_loads_neither_torch_nor_the_extension(run_python: RunPython) -> None:
    code = (
        "import sys, torch_dcpx; torch_dcpx.__version__; torch_dcpx.DcpxError; dir(torch_dcpx);"
        "print([m for m in sys.modules if m.split('.')[0] == 'torch' or m == 'torch_dcpx._C'])"
    )
    assert run_python(code).stdout.strip() == "[]"


LOADING = [
    "torch_dcpx.DcpxWriter", "from torch_dcpx import DcpxReader", "from torch_dcpx import _C",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("state", ["missing", "broken", "foreign"])
def test_extension_that_does_not_load_is_a_loud_import_error(
    state: str, tmp_path: Path, run_python: RunPython
) -> None:
    """Whatever asks for it first: each statement in a child, forked where torch is there."""
    package = copy_of_package(tmp_path / "copy")
    name = extension_file().name
    if state == "broken":
        (package / name).write_bytes(b"no ELF file")
    elif state == "foreign":
        (package / "_C.cpython-27-vax.so").write_bytes(b"")
    code = (
        "import json, os\n"
        "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"  # its entry point is not the copy's
        f"import torch.distributed.checkpoint\n{IMPORT_THE_COPY}"
        "for statement in sys.argv[2:]:\n"
        "    if os.fork() == 0:\n"
        "        try:\n            exec(statement)\n"
        "        except ImportError as error:\n"
        "            said = type(error).__name__, error.name, str(error)\n"
        "            print(json.dumps(said), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    said = run_python(code, str(package.parent), *LOADING).stdout.splitlines()
    assert len(said) == len(LOADING)
    cause = {"missing": "never built", "broken": "invalid ELF header|too short", "foreign": "vax"}
    for kind, name, message in map(json.loads, said):
        assert (kind, name) == ("ImportError", "torch_dcpx._C")
        assert "pip install" in message
        assert re.search(cause[state], message)


def test_import_error_of_another_module_is_not_blamed_on_the_extension(
    tmp_path: Path, run_python: RunPython
) -> None:
    package = copy_of_package(tmp_path / "copy")
    (package / "options.py").write_text("import a_module_that_is_not_there\n")
    code = (
        f"{IMPORT_THE_COPY}"
        "try:\n    torch_dcpx.WriteOptions\n"
        "except ImportError as error:\n    print(error.name)\n"
    )
    assert run_python(code, str(package.parent)).stdout.strip() == "a_module_that_is_not_there"


# ---- The tools of the build ---------------------------------------------------------------------


@pytest.mark.parametrize(("version", "is_too_old"), [
    ("68.0.0.post20230822", True), ("77.0.2", True), ("77.0.3", False), ("100.1", False),
])  # fmt: skip
def test_setuptools_that_is_too_old_ends_the_build_with_one_line(
    tmp_path: Path, version: str, is_too_old: bool
) -> None:
    command = tmp_path / "setuptools" / "command"
    command.mkdir(parents=True)
    (command.parent / "__init__.py").write_text(
        f"__version__ = {version!r}\nclass Extension: __init__ = lambda *_, **__: None\n"
        "def setup(**_): print('setup')\n"
    )
    (command / "build_ext.py").write_text("class build_ext: pass\n")
    done = subprocess.run(
        [sys.executable, "-S", "setup.py", "bdist_wheel"],  # -S: without torch
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=seconds(60),
    )
    if not is_too_old:
        assert (done.returncode, done.stdout, done.stderr) == (0, "setup\n", "")
        return
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"torch-dcpx needs setuptools 77.0.3 or newer to build, and this is {version}: pip install"
    )


# ---- The distribution ---------------------------------------------------------------------------


def pip(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *args]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=seconds(1150), check=False
    )


@pytest.mark.slow
def test_sdist_builds_a_wheel_in_isolation_without_torch(
    tmp_path: Path, run_python: RunPython
) -> None:
    if not (ROOT / "setup.py").is_file() or importlib.util.find_spec("build") is None:
        pytest.skip("needs the source tree and the package `build`")
    probe = pip("download", "--no-deps", "-d", str(tmp_path / "probe"), "pybind11", cwd=tmp_path)
    if probe.returncode != 0:
        pytest.skip(f"pip reaches no package index: {probe.stderr.strip().splitlines()[-1]}")

    # A copy: a build leaves build/ and *.egg-info behind, and may find those of another build.
    # Other tests write to the first three meanwhile.
    left_out = [".*_cache", ".hypothesis", "__pycache__", ".git", ".venv*", "build", "dist"]
    ignore = shutil.ignore_patterns(*left_out, "*.so", "*.egg-info")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=ignore)
    build = subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", "../sdist", "."],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=seconds(1150),
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")

    wheel_dir = tmp_path / "wheel"
    built = pip("wheel", "-v", "--no-deps", "-w", str(wheel_dir), str(sdist), cwd=tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    log = built.stdout + built.stderr
    assert re.findall(r"(?:Collecting|Downloading|Processing).*\btorch[-=]", log) == []
    assert "TORCH_EXTENSION_NAME" not in log  # torch's BuildExtension had no part in it

    (wheel,) = wheel_dir.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "unpacked")
    assert {"torch_dcpx/__init__.py", "torch_dcpx/py.typed", "torch_dcpx/_C.pyi"} <= set(names)
    assert not [name for name in names if name.startswith(("csrc", "tests"))]
    code = f"{IMPORT_THE_COPY}from torch_dcpx import _C; print(_C.__file__)"
    unpacked = str(tmp_path / "unpacked")
    assert run_python(code, unpacked).stdout.startswith(unpacked)


def headers_without(name: str, folder: Path) -> list[str]:
    """The compiler's arguments for its own headers without one of them."""
    said = subprocess.run(
        ["c++", "-E", "-v", "-x", "c++", os.devnull], capture_output=True, text=True, check=True
    ).stderr
    listed = said.split("#include <...> search starts here:")[1].split("End of search list")[0]
    arguments = ["-nostdinc", "-nostdinc++"]
    for number, root in enumerate(Path(line.strip()) for line in listed.splitlines() if line):
        if (root / name).exists():
            mirror, inner = folder / str(number), Path(name).parent
            (mirror / inner).mkdir(parents=True)
            for one in [*root.iterdir(), *(root / inner).iterdir()]:
                if one not in (root / inner, root / name):
                    (mirror / one.relative_to(root)).symlink_to(one)
            arguments += ["-isystem", str(mirror)]
        else:
            arguments += ["-isystem", str(root)]
    return arguments


def test_calls_of_the_system_build_with_headers_before_linux_5_6(tmp_path: Path) -> None:
    arguments = headers_without("linux/openat2.h", tmp_path)
    source = ROOT / "csrc" / "io" / "system_calls.cpp"
    command = ["c++", "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", *arguments, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
