"""Build of the one extension module, `torch_dcpx._C`, from everything under csrc/.

The module includes no torch header and links no torch library, so that one binary serves every
torch. Torch is therefore no build requirement: where it is importable its `BuildExtension` (ninja,
incremental) runs the compiler, elsewhere setuptools does, with the same flags.

Environment:
    DCPX_WERROR=1                 warnings are errors (CI)
    DCPX_SANITIZE=address|thread  build with AddressSanitizer + UBSan, or with ThreadSanitizer
    DCPX_CUDA=auto|0|1            the pack kernel: where an nvcc that works is found (CUDA_HOME,
                                  PATH), never, or always (else the build fails). No GPU is needed
    MAX_JOBS=N                    compiler processes at once (default: cores, at least 2)
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import setuptools
from setuptools.command.build_ext import build_ext as setuptools_build_ext

ROOT = Path(__file__).resolve().parent
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    f"-ffile-prefix-map={ROOT}/=",  # __FILE__ is the same wherever it is built
    "-Wall",
    "-Wextra",
    "-Wconversion",
    "-Wshadow",
]
# The version script also hides the weak symbols of std:: templates, which -fvisibility does not.
EXPORTS = "csrc/bind/exports.map"
LINK_FLAGS = [f"-Wl,--version-script={ROOT / EXPORTS}", "-Wl,--exclude-libs,ALL"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
KERNEL = "csrc/device/pack.cu"
ABI_CHECK = "csrc/device/cuda_abi_check.cpp"  # compares own declarations with the toolkit's
# Of these, those that nvcc knows; PTX of the oldest serves what comes after them.
KERNEL_ARCHS = (75, 80, 86, 89, 90, 100, 103, 110, 120)


def check_setuptools() -> None:
    """Stops the build with one line where setuptools cannot read pyproject.toml."""
    needed = re.search(r"setuptools>=([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]
    found = setuptools.__version__
    if [int(n) for n in re.findall(r"\d+", found)[:3]] < [int(n) for n in needed.split(".")]:
        raise SystemExit(
            f"torch-dcpx needs setuptools {needed} or newer to build, and this is {found}: "
            f"pip install 'setuptools>={needed}', or build without --no-build-isolation"
        )


def check_platform() -> None:
    """Stops the build with the reason where torch-dcpx cannot work."""
    machine = platform.machine().lower()
    if not sys.platform.startswith("linux") or machine not in (
        "x86_64",
        "amd64",
        "aarch64",
        "arm64",
    ):
        raise SystemExit(
            "torch-dcpx builds on Linux x86-64 and aarch64 only (it needs Linux system calls such "
            f"as O_DIRECT and openat2); this is {sys.platform} on {machine}"
        )


def compile_flags() -> tuple[list[str], list[str]]:
    """Returns the compiler's and the linker's flags, switches of the environment included."""
    cxx, link = list(CXX_FLAGS), list(LINK_FLAGS)
    if os.environ.get("DCPX_WERROR", "0") not in ("", "0"):
        cxx.append("-Werror")
    sanitizer = os.environ.get("DCPX_SANITIZE", "")
    if sanitizer:
        if sanitizer not in SANITIZERS:
            raise SystemExit(f"DCPX_SANITIZE={sanitizer}: expected one of {sorted(SANITIZERS)}")
        cxx += [*SANITIZERS[sanitizer], "-O1", "-g1", "-fno-omit-frame-pointer"]
        link += SANITIZERS[sanitizer]
    return cxx, link


def pybind11_include(build_temp: str) -> str:
    """Returns an include root with pybind11's headers.

    Without pybind11 itself (no build isolation, no network) torch's copy serves, but only that
    folder of torch's headers, so that no torch header can be included by accident.
    """
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return str(pybind11.get_include())
    torch = importlib.util.find_spec("torch")
    for location in (torch.submodule_search_locations or []) if torch else []:
        bundled = Path(location) / "include" / "pybind11"
        if bundled.is_dir():
            root = Path(build_temp).resolve() / "pybind11-of-torch"
            shutil.copytree(bundled, root / "pybind11", dirs_exist_ok=True)
            return str(root)
    raise SystemExit(
        "torch-dcpx needs the headers of pybind11 to build and found neither pybind11 nor a torch "
        "that bundles them: pip install pybind11, or build without --no-build-isolation"
    )


def find_nvcc() -> str | None:
    """Returns the nvcc that DCPX_CUDA asks for: of CUDA_HOME or CUDA_PATH, else of PATH."""
    wanted = os.environ.get("DCPX_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"DCPX_CUDA={wanted}: expected auto, 0 or 1")
    if wanted == "0":
        return None
    homes = [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    for home in homes:
        if (nvcc := Path(home) / "bin" / "nvcc").is_file():
            return str(nvcc)
    if (found := shutil.which("nvcc")) is not None:
        return found
    if wanted == "1":
        places = ", ".join([*(f"{home}/bin" for home in homes), "PATH"])
        raise SystemExit(
            f"DCPX_CUDA=1 asks for the CUDA kernel, and no nvcc was found in {places}: install the "
            "CUDA toolkit, set CUDA_HOME, or build without the kernel (DCPX_CUDA=0)"
        )
    return None


class NvccError(Exception):
    """This nvcc makes no kernel."""


def run_nvcc(command: list[str]) -> str:
    """Returns nvcc's output; raises NvccError with all it said where it fails."""
    try:
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise NvccError(f"{command[0]} does not run: {error}") from error
    if done.returncode != 0:
        said = f"{done.stdout}{done.stderr}".strip()
        raise NvccError(f"{' '.join(command)} failed ({done.returncode}):\n{said}")
    return done.stdout


def optional_kernel(build_temp: str) -> list[str]:
    """Returns the kernel's C++ file; nothing where there is to be none, or none could be made.

    A kernel that could not be made stops the build where DCPX_CUDA=1 asks for it; else it is a
    warning, as copies do all its work, only in more calls.
    """
    if (nvcc := find_nvcc()) is None:
        return []
    try:
        return [kernel_source(nvcc, build_temp)]
    except NvccError as error:
        if os.environ.get("DCPX_CUDA") == "1":
            raise SystemExit(f"{error}\nDCPX_CUDA=0 builds without the CUDA kernel") from error
        print(f"warning: {error}\nbuilding without the CUDA kernel", file=sys.stderr)
        return []


def kernel_source(nvcc: str, build_temp: str) -> str:
    """Compiles the pack kernel and returns the C++ file that holds it, made anew where it must be.

    Not compressed: older drivers cannot unpack what a newer nvcc packs.
    """
    target = Path(build_temp) / "pack_fatbin.cpp"
    known = set(run_nvcc([nvcc, "--list-gpu-code"]).split())
    archs = [arch for arch in KERNEL_ARCHS if f"sm_{arch}" in known]
    if not archs:
        raise NvccError(f"{nvcc} serves none of sm_{KERNEL_ARCHS}")
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    codes.append(f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}")
    command = ["-fatbin", "-std=c++17", "-O3", "-no-compress", "-Icsrc", *codes, KERNEL]
    inputs = hashlib.sha256(run_nvcc([nvcc, "--version"]).encode())
    inputs.update(" ".join(command).encode())
    for path in (KERNEL, "csrc/device/pack_index.h", ABI_CHECK, "csrc/device/cuda_abi.h"):
        inputs.update((ROOT / path).read_bytes())
    stamp = f"// Made by setup.py from {KERNEL}, {inputs.hexdigest()}\n"
    if target.is_file() and target.read_text().startswith(stamp):
        return os.path.relpath(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fatbin = target.with_suffix(".fatbin").resolve()
    checked = str(fatbin.with_name("cuda_abi_check.o"))
    run_nvcc([nvcc, "-c", "-std=c++17", "-DDCPX_CHECK_ABI", "-Icsrc", ABI_CHECK, "-o", checked])
    run_nvcc([nvcc, *command, "-o", str(fatbin)])
    data = fatbin.read_bytes()
    data += bytes(-len(data) % 8)
    words = [f"0x{int.from_bytes(data[i : i + 8], 'little'):x}" for i in range(0, len(data), 8)]
    lines = [",".join(words[i : i + 8]) for i in range(0, len(words), 8)]
    name = "alignas(64) const unsigned long long dcpx_pack_fatbin[]"
    target.write_text(
        f"{stamp}extern const unsigned long long dcpx_pack_fatbin[];\n"
        f"{name} = {{\n" + ",\n".join(lines) + "};\n"
    )
    return os.path.relpath(target)


def jobs() -> int:
    return int(os.environ.get("MAX_JOBS") or max(2, len(os.sched_getaffinity(0))))


def base_build_ext() -> Any:
    """Returns torch's `BuildExtension` where torch is importable, else setuptools' command."""
    if importlib.util.find_spec("torch") is None:
        return setuptools_build_ext
    try:
        from torch.utils.cpp_extension import BuildExtension
    except (ImportError, OSError) as error:  # OSError: a library of torch does not load
        print(f"torch is installed but unusable ({error}); building without it", file=sys.stderr)
        return setuptools_build_ext
    os.environ["MAX_JOBS"] = str(jobs())  # ninja's own default is cores + 2: too much memory
    return BuildExtension


check_setuptools()  # before torch is imported: an old one fails there in its own way


class BuildExt(base_build_ext()):
    """Adds the include roots, and compiles sources in parallel where ninja does not."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # objects in build/ may be of other flags; ninja looks for itself

    def build_extension(self, ext: setuptools.Extension) -> None:
        # -isystem, also over build_ext's own -I: our warnings are not for foreign headers.
        for root in (pybind11_include(self.build_temp), sysconfig.get_path("include")):
            ext.extra_compile_args += ["-isystem", root]
        ext.sources += optional_kernel(self.build_temp)
        if not getattr(self, "use_ninja", False):
            self._compile_in_parallel()
        super().build_extension(ext)

    def _compile_in_parallel(self) -> None:
        compile_serially = self.compiler.compile

        def compile_all(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
            with ThreadPoolExecutor(jobs()) as pool:
                objects = pool.map(lambda src: compile_serially([src], *args, **kwargs), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_all


def extension() -> setuptools.Extension:
    cxx, link = compile_flags()
    csrc = Path(os.path.relpath(ROOT / "csrc"))  # setuptools wants relative sources
    headers = sorted(str(path) for path in csrc.rglob("*.h"))
    return setuptools.Extension(
        "torch_dcpx._C",
        sources=sorted(str(path) for path in csrc.rglob("*.cpp")),
        depends=[*headers, EXPORTS, "setup.py"],
        include_dirs=[str(ROOT / "csrc")],  # absolute: ninja compiles from another directory
        extra_compile_args=cxx,
        extra_link_args=link,
        language="c++",
    )


check_platform()
setuptools.setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt})
