"""Build of the one extension module, `torch_dcpx._C`, from everything under csrc/.

The module includes no torch header and links no torch library, so that one binary serves every
torch. Torch is therefore no build requirement: where it is importable its `BuildExtension` (ninja,
incremental) runs the compiler, elsewhere setuptools does, on all cores, with the same flags. The
sources that share pybind11's headers are joined.

Environment:
    DCPX_WERROR=1                 warnings are errors (CI)
    DCPX_SANITIZE=address|thread  build with AddressSanitizer + UBSan, or with ThreadSanitizer
    DCPX_CUDA=auto|0|1            the pack kernel: where an nvcc that works is found (CUDA_HOME,
                                  PATH), never, or always (else the build fails). No GPU is needed
    DCPX_TARGET=MACHINE-linux-gnu.GLIBC
                                  a manylinux wheel for x86_64 or aarch64 and that glibc or a newer
                                  one, compiled by zig (package ziglang): see `make wheels`
    MAX_JOBS=N                    compiler processes at once (default: cores, at least 2)
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
LINK_FLAGS = [f"-Wl,--version-script={ROOT / EXPORTS}"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
# Rooms whose sources include pybind11: of 13 s that a compiler takes for each, 12 go to pybind11,
# and 30 s for eight of them together.
JOINED_ROOMS = ("bind", "dcp")
TARGET = re.compile(r"(x86_64|aarch64)-linux-gnu\.(2\.\d+)")
NINJA_LINE = re.compile(rb"(\[\d+/\d+\] ).* -c (\S+) -o ")
KERNEL = "csrc/device/pack.cu"
ABI_CHECK = "csrc/device/cuda_abi_check.cpp"  # compares own declarations with the toolkit's
# Of these, those that nvcc knows; PTX of the oldest serves what comes after them.
KERNEL_ARCHS = (75, 80, 86, 89, 90, 100, 103, 110, 120)
# What C++ takes of libgcc_s.so.1, by the version of its symbols (stub_unwinder).
UNWINDER = {
    "GCC_3.0": [
        "_Unwind_DeleteException", "_Unwind_ForcedUnwind", "_Unwind_GetDataRelBase",
        "_Unwind_GetGR", "_Unwind_GetIP", "_Unwind_GetLanguageSpecificData",
        "_Unwind_GetRegionStart", "_Unwind_GetTextRelBase", "_Unwind_RaiseException",
        "_Unwind_Resume", "_Unwind_SetGR", "_Unwind_SetIP",
    ],
    "GCC_3.3": ["_Unwind_Backtrace", "_Unwind_GetCFA", "_Unwind_Resume_or_Rethrow"],
    "GCC_4.2.0": ["_Unwind_GetIPInfo"],
}  # fmt: skip


def check_python() -> None:
    """Stops the build with one line where Python is older than pyproject.toml says."""
    needed = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    if sys.version_info[:2] < tuple(map(int, needed.split("."))):
        raise SystemExit(
            f"torch-dcpx needs Python {needed} or newer, and this is {platform.python_version()}"
        )


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
    names = sysconfig.get_config_vars("SOABI", "HOST_GNU_TYPE", "MULTIARCH")
    if any("musl" in str(name) for name in names):
        raise SystemExit(
            "torch-dcpx builds with glibc only, as torch does: this Python is of musl (Alpine)"
        )


def check_headers() -> None:
    """Stops the build with one line where there is no compiler, or no header of Python."""
    include = sysconfig.get_path("include")
    is_there = Path(include, "Python.h").is_file()
    if target() is not None and is_there:
        if "SIZEOF_LONG" not in Path(include, "pyconfig.h").read_text():
            raise SystemExit(
                f"DCPX_TARGET needs headers of Python that serve any machine, and {include} has "
                "those of Debian, which only name others: take a Python of pyenv"
            )
        return
    if not is_there:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SystemExit(
            f"torch-dcpx needs the headers of Python {version} to build, and {include} has no "
            f"Python.h: apt install python{version}-dev, or dnf install python{version}-devel"
        )
    if shutil.which(compiler()) is None:
        raise SystemExit(
            f"torch-dcpx needs a C++17 compiler to build, and there is no {compiler()}: "
            "apt install g++, or dnf install gcc-c++"
        )


def compiler() -> str:
    """Returns the program that compiles: of CXX, else torch's choice or setuptools'."""
    own = "c++" if base_build_ext() is not setuptools_build_ext else None
    command = os.environ.get("CXX") or own or sysconfig.get_config_var("CXX") or "c++"
    return (shlex.split(command) or ["c++"])[0]


def target() -> tuple[str, str] | None:
    """Returns the machine and the glibc that DCPX_TARGET asks for, if it is set."""
    wanted = os.environ.get("DCPX_TARGET")
    if not wanted:
        return None
    match = TARGET.fullmatch(wanted)
    if match is None:
        raise SystemExit(f"DCPX_TARGET={wanted}: expected x86_64 or aarch64-linux-gnu.GLIBC")
    if importlib.util.find_spec("ziglang") is None:
        raise SystemExit(f"DCPX_TARGET={wanted} needs the package ziglang: pip install ziglang")
    return match[1], match[2]


def compile_flags() -> tuple[list[str], list[str]]:
    """Returns the compiler's and the linker's flags, switches of the environment included."""
    cxx, link = list(CXX_FLAGS), list(LINK_FLAGS)
    if os.environ.get("DCPX_WERROR", "0") not in ("", "0"):
        cxx.append("-Werror")
    sanitizer = os.environ.get("DCPX_SANITIZE", "")
    if sanitizer:
        if os.environ.get("DCPX_TARGET"):
            raise SystemExit("DCPX_SANITIZE and DCPX_TARGET: a wheel for others has no sanitizer")
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
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", os.defpath)]
    found = shutil.which("nvcc", path=os.pathsep.join(places))
    if found is not None:
        return found
    if wanted == "1":
        raise SystemExit(
            "DCPX_CUDA=1 asks for the CUDA kernel, and no nvcc was found in "
            f"{', '.join([*places[:-1], 'PATH'])}: install the CUDA toolkit, set CUDA_HOME, or "
            "build without the kernel (DCPX_CUDA=0)"
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
    nvcc = find_nvcc()
    if nvcc is None:
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
    wanted = os.environ.get("MAX_JOBS") or str(max(2, len(os.sched_getaffinity(0))))
    if not re.fullmatch(r"[1-9]\d*", wanted):
        raise SystemExit(f"MAX_JOBS={wanted}: expected a number of compiler processes, 1 or more")
    return int(wanted)


def base_build_ext() -> Any:
    """Returns torch's `BuildExtension` where torch is importable, else setuptools' command."""
    if target() is not None or importlib.util.find_spec("torch") is None:
        return setuptools_build_ext
    try:
        from torch.utils.cpp_extension import BuildExtension
    except (ImportError, OSError) as error:  # OSError: a library of torch does not load
        print(f"torch is installed but unusable ({error}); building without it", file=sys.stderr)
        return setuptools_build_ext
    os.environ["MAX_JOBS"] = str(jobs())  # ninja's own default is cores + 2: too much memory
    return BuildExtension


check_python()
check_setuptools()  # before torch is imported: an old one fails there in its own way


class BuildExt(base_build_ext()):
    """Adds the include roots, and compiles sources in parallel where ninja does not."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # pip's own folder is gone afterwards, and all is compiled again
            name = f"temp.{self.plat_name}-{sys.implementation.cache_tag}"
            self.build_temp = str(Path("build", name))
        self.force = True  # objects in build/ may be of other flags; ninja looks for itself

    def get_ext_filename(self, fullname: str) -> str:
        name: str = super().get_ext_filename(fullname)
        wanted = target()
        return name if wanted is None else re.sub(r"(x86_64|aarch64)(?=-linux)", wanted[0], name)

    def build_extension(self, ext: setuptools.Extension) -> None:
        find_nvcc()  # before anything is compiled: it says what is wrong with DCPX_CUDA
        check_headers()
        # -isystem, also over build_ext's own -I: our warnings are not for foreign headers.
        for root in (pybind11_include(self.build_temp), sysconfig.get_path("include")):
            ext.extra_compile_args += ["-isystem", root]
        ext.sources = joined_sources(ext.sources, self.build_temp)
        if getattr(self, "use_ninja", False):
            ext.sources += optional_kernel(self.build_temp)
        else:
            if target() is not None:
                self._compile_for_target(ext)
            self._compile_in_parallel()
        with short_lines():
            super().build_extension(ext)

    def _compile_in_parallel(self) -> None:
        compile_serially = self.compiler.compile

        def compile_all(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
            done = itertools.count(1)
            count = len(sources) + 1

            def timed(name: str, work: Callable[[], list[str]]) -> list[str]:
                began = time.monotonic()
                objects = work()
                took = time.monotonic() - began
                print(f"[{next(done)}/{count}] {name}, {took:.1f} s", flush=True)
                return objects

            def kernel() -> list[str]:
                names = optional_kernel(self.build_temp)
                return compile_serially(names, *args, **kwargs) if names else []

            def compiled(source: str) -> list[str]:
                return timed(source, lambda: compile_serially([source], *args, **kwargs))

            sources = sorted(sources, key=lambda name: "joined" not in name)  # the longest first
            with ThreadPoolExecutor(jobs()) as pool:
                futures = [pool.submit(timed, KERNEL, kernel)]
                futures += [pool.submit(compiled, source) for source in sources]
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = next((one for one in ended if one.exception() is not None), None)
                if failed is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                    failed.result()
                return [name for one in (*futures[1:], futures[0]) for name in one.result()]

        self.compiler.compile = compile_all

    def _compile_for_target(self, ext: setuptools.Extension) -> None:
        """Makes zig the compiler: none of the flags that this Python was built with."""
        machine, glibc = target() or ("", "")
        zig = [sys.executable, "-m", "ziglang"]
        cxx = [*zig, "c++", "-target", f"{machine}-linux-gnu.{glibc}"]
        compiler, linker = [*cxx, "-fPIC", "-DNDEBUG"], [*cxx, "-shared", "-s"]
        tools = {"compiler": cxx, "linker_exe": cxx, "compiler_so": compiler, "linker_so": linker}
        tools |= {f"{name}_cxx": command for name, command in tools.items()}
        self.compiler.set_executables(**tools)
        self.compiler.library_dirs = []
        ext.extra_link_args.append(stub_unwinder([*zig, "cc", *cxx[4:]], self.build_temp))


@contextlib.contextmanager
def short_lines() -> Iterator[None]:
    """Of ninja's lines, which are whole commands, `[17/69]` and the source are printed."""
    sys.stdout.flush()
    kept = os.dup(1)
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)

    def print_all() -> None:
        with open(reading, "rb") as lines, open(kept, "wb", closefd=False) as printed:
            for line in lines:
                step = NINJA_LINE.match(line)
                source = os.path.relpath(step[2].decode(), ROOT).encode() if step else b""
                printed.write(step[1] + source + b"\n" if step else line)
                printed.flush()

    printing = threading.Thread(target=print_all, daemon=True)
    printing.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        printing.join(10)  # a compiler's cache may have left a server that holds the pipe


def stub_unwinder(compiler: list[str], build_temp: str) -> str:
    """Makes a libgcc_s.so.1 to link with, whose functions the system's own has.

    zig would link an unwinder of its own in. Where glibc unwinds a thread that ends
    (pthread_exit), the system's meets frames of this module, and the two do not know each other's
    state.
    """
    folder = Path(build_temp) / "unwinder"
    folder.mkdir(parents=True, exist_ok=True)
    source, symbols = folder / "unwinder.c", folder / "unwinder.map"
    names = [name for names in UNWINDER.values() for name in names]
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    symbols.write_text(
        "".join(f"{node} {{ {'; '.join(names)}; }};\n" for node, names in UNWINDER.items())
    )
    library = folder / "libgcc_s.so.1"
    flags = ["-shared", "-nostdlib", f"-Wl,-soname,{library.name}"]
    flags.append(f"-Wl,--version-script={symbols.resolve()}")
    subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
    return str(library)


def joined_sources(sources: list[str], build_temp: str) -> list[str]:
    """Returns the sources with those of JOINED_ROOMS replaced by two files a room that include
    them, which change only where a source comes or goes."""
    folder = Path(os.path.relpath(build_temp)) / "joined"
    folder.mkdir(parents=True, exist_ok=True)
    joined = []
    for room in JOINED_ROOMS:
        own = [source for source in sources if Path(source).parts[1] == room]
        own.sort()
        for number, some in enumerate((own[::2], own[1::2])):
            path = folder / f"{room}_{number + 1}.cpp"
            text = "".join(f'#include "{room}/{Path(source).name}"\n' for source in some)
            if not path.is_file() or path.read_text() != text:
                path.write_text(text)
            joined.append(str(path))
    return [*joined, *(s for s in sources if Path(s).parts[1] not in JOINED_ROOMS)]


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


def options() -> dict[str, dict[str, str]]:
    """Returns setup()'s options: the name of a wheel for others says which glibc it needs."""
    wanted = target()
    if wanted is None:
        return {}
    machine, glibc = wanted
    name = f"manylinux_{glibc.replace('.', '_')}_{machine}"
    return {"bdist_wheel": {"plat_name": name}, "build": {"build_base": f"build/{name}"}}


check_platform()
setuptools.setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExt}, options=options())
