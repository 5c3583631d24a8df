"""Builds the wheels of one commit, for each Python and machine, and looks at each of them.

A wheel comes from the commit, never from the working tree; its files have the commit's time, and
nothing in it depends on the folder, so that whoever builds the commit again gets the same bytes,
with the same Python releases (their headers and zlib) and the same nvcc.

    python requirements/wheels.py --out dist/wheels [--commit HEAD] [--work build/wheels]
        [--pythons python3.10 ...]  (3.10 to 3.13, each from PATH or pyenv)
        [--machines x86_64 aarch64]

Run by `make wheels`, in an environment with requirements/wheels.txt. Needs nvcc and the headers of
each Python. Writes the wheels and SHA256SUMS into --out, once all are good; wheels of before go.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
GLIBC = (2, 28)
MAX_BYTES = 4 << 20
LIBRARIES = re.compile(r"(libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux[\w-]*)\.so\.\d+")
REQUIREMENTS = "requirements/wheels.txt"
FATBIN = bytes.fromhex("50ed55ba")  # the first bytes of the pack kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--pythons", nargs="+", default=VERSIONS)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    options = parser.parse_args()

    pythons = {version: python for python, version in map(find_python, options.pythons)}
    commit = git("rev-parse", "--verify", f"{options.commit}^{{commit}}").decode().strip()
    seconds = git("log", "-1", "--no-show-signature", "--format=%ct", commit).decode().strip()
    print(f"== wheels of {commit}", flush=True)
    if git("status", "--porcelain", "--untracked-files=no"):
        print("   changes that are not committed are left out", flush=True)
    source, built = (options.work.resolve() / f"torch-dcpx-{name}" for name in ("source", "built"))
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir(parents=True)
    wheels = []
    for version, python in pythons.items():
        builder = environment(python, version, git("show", f"{commit}:{REQUIREMENTS}"))
        for machine in options.machines:
            export(commit, source)
            wheel = build(builder, source, machine, seconds, built)
            complaints = audit(wheel, version, machine, [str(source), str(ROOT)])
            if complaints:
                raise SystemExit("\n".join([f"{wheel} is no release:", *complaints]))
            if machine == platform.machine():
                import_from(wheel, builder)
            wheels.append(wheel)
    for wheel in wheels:
        look_at(wheel)
    sums = [f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels]
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("torch_dcpx-*.whl"):
        old.unlink()
    for wheel in wheels:
        shutil.copyfile(wheel, options.out / wheel.name)
    (options.out / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="", flush=True)


def git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


# Its version, and its headers: Debian's only name those of a machine, which zig does not find.
ASK = """
import pathlib, sys, sysconfig
assert not getattr(sys, "abiflags", "")
assert "SIZEOF_LONG" in pathlib.Path(sysconfig.get_path("include"), "pyconfig.h").read_text()
print("%d.%d" % sys.version_info[:2])
"""


def find_python(name: str) -> tuple[str, str]:
    """Returns the Python of a version or path that has headers, and its version."""
    candidates = [name]
    if name in VERSIONS:
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        candidates = [
            f"python{name}",
            *sorted(map(str, root.glob(f"versions/{name}.*/bin/python"))),
        ]
    for candidate in candidates:
        try:
            said = subprocess.run([candidate, "-c", ASK], capture_output=True, text=True).stdout
        except OSError:
            continue
        if said.strip() in VERSIONS:
            return candidate, said.strip()
    raise SystemExit(
        f"no Python {name} on PATH or under pyenv has headers that serve any machine, as pyenv's "
        f"do and Debian's do not (wheels are for {', '.join(VERSIONS)})"
    )


def environment(python: str, version: str, requirements: bytes) -> Path:
    """Returns the Python of an environment of that one with the build's tools."""
    folder = ROOT / ".venv-wheels" / version
    builder, stamp = folder / "bin" / "python", folder / "ready.txt"
    ask = "import os, sys; print(os.path.realpath(sys.executable), sys.version)"
    made_of = subprocess.run([python, "-c", ask], capture_output=True, check=True).stdout
    made_of += requirements
    if not builder.exists() or not stamp.is_file() or stamp.read_bytes() != made_of:
        print(f"== an environment for {python} (once)", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        (folder / "requirements.txt").write_bytes(requirements)
        install = ["-m", "pip", "install", "-q", "-r", folder / "requirements.txt"]
        subprocess.run([builder, *install], check=True)
        stamp.write_bytes(made_of)
    return builder


def export(commit: str, source: Path) -> None:
    """Writes the commit's files into a folder that is made anew: a build leaves things behind."""
    shutil.rmtree(source, ignore_errors=True)
    archive = git("-c", "tar.umask=0022", "archive", "--format=tar", commit)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(source)  # noqa: S202  # of our own commit


def build(builder: Path, source: Path, machine: str, seconds: str, out: Path) -> Path:
    """Returns the wheel for a machine."""
    print(f"== {machine}, {builder.parents[1].name}", flush=True)
    target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("NVCC_")}
    env |= {"DCPX_TARGET": target, "DCPX_CUDA": "1", "SOURCE_DATE_EPOCH": seconds}
    env |= {"DCPX_SANITIZE": ""}
    command = [builder, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    before = set(out.iterdir())
    subprocess.run([*command, "-w", out, "."], cwd=source, env=env, umask=0o022, check=True)
    (wheel,) = set(out.iterdir()) - before
    return wheel


def import_from(wheel: Path, builder: Path) -> None:
    """Loads the wheel's module in the Python that it is for, which needs no torch for that."""
    code = "from torch_dcpx import _C; assert _C.crc32(b'123456789') == 0xCBF43926"
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)  # noqa: S202  # of our own wheel
        subprocess.run([builder, "-c", code], cwd=folder, check=True)


def audit(wheel: Path, version: str, machine: str, folders: list[str]) -> list[str]:
    """Returns what is wrong with a wheel, a line each; `folders` must not be named in it."""
    return list(_complaints(wheel, version, machine, folders))


def _complaints(wheel: Path, version: str, machine: str, folders: list[str]) -> Iterator[str]:
    python = f"cp{version.replace('.', '')}"
    tag = f"{python}-{python}-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    if not wheel.name.endswith(f"-{tag}.whl"):
        yield f"the name ends otherwise than in {tag}"
    if wheel.stat().st_size > MAX_BYTES:
        yield f"{wheel.stat().st_size} bytes, more than {MAX_BYTES}"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (described,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    if email.message_from_bytes(files[described]).get_all("Tag") != [tag]:
        yield f"WHEEL has another tag than {tag}"
    for name, data in files.items():
        yield from (f"{name} names {folder}" for folder in folders if folder.encode() in data)
    wanted = f"torch_dcpx/_C.cpython-{python[2:]}-{machine}-linux-gnu.so"
    binaries = [name for name, data in files.items() if data.startswith(b"\x7fELF")]
    if binaries != [wanted]:
        yield f"the binaries are {binaries}, and not {wanted}"
    for name in binaries:
        yield from (f"{name} {complaint}" for complaint in _binary_complaints(files[name], machine))


def _binary_complaints(data: bytes, machine: str) -> Iterator[str]:
    elf = ELFFile(io.BytesIO(data))
    if elf["e_machine"] != MACHINES[machine]:
        yield f"is of {elf['e_machine']}"
    dynamic = elf.get_section_by_name(".dynamic")
    needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
    foreign = [name for name in needed if not LIBRARIES.fullmatch(name)]
    if foreign:
        yield f"needs {foreign}"
    if "libgcc_s.so.1" not in needed:
        yield "does not use the system's unwinder"
    tags = {tag.entry.d_tag for tag in dynamic.iter_tags()}
    if tags & {"DT_RPATH", "DT_RUNPATH"}:
        yield "has a path to libraries"
    stacks = [part["p_flags"] for part in elf.iter_segments("PT_GNU_STACK")]
    if "DT_TEXTREL" in tags or stacks != [6]:  # readable and writable
        yield "has code that can be written to"
    symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    exported = [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s.name]
    if exported != ["PyInit__C"]:
        yield f"exports {len(exported)} symbols: {exported[:3]}"
    versions = elf.get_section_by_name(".gnu.version")
    for number, symbol in enumerate(symbols):
        if symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL":
            has_version = versions and versions.get_symbol(number)["ndx"] != "VER_NDX_GLOBAL"
            if not has_version and not symbol.name.startswith(("Py", "_Py")):
                yield f"needs {symbol.name} of nobody"
    unfit = sorted(name for name in _glibc_versions(elf) if not _is_served(name))
    if unfit:
        yield f"needs {', '.join(unfit)}"
    if elf.get_section_by_name(".debug_info") is not None:
        yield "has debug information"
    if FATBIN not in data:
        yield "has no pack kernel"


def _glibc_versions(elf: ELFFile) -> Iterator[str]:
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                yield from (one.name for one in versions if one.name.startswith("GLIBC_"))


def _is_served(name: str) -> bool:
    version = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name)
    return version is not None and (int(version[1]), int(version[2])) <= GLIBC


def look_at(wheel: Path) -> None:
    """Lets others' tools look at a wheel."""
    print(f"== {wheel.name}", flush=True)
    for tool in ("auditwheel show", "twine check --strict", "check-wheel-contents"):
        name, *arguments = tool.split()
        command = [str(Path(sys.executable).parent / name), *arguments, str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True)
        said = f"{done.stdout}{done.stderr}".strip()
        if done.returncode != 0:
            raise SystemExit(f"{tool} {wheel.name} ({done.returncode}):\n{said}")
        if name == "auditwheel":
            tag = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_', said)
            if tag is None or (int(tag[1]), int(tag[2])) > GLIBC:
                raise SystemExit(f"{tool} {wheel.name}:\n{said}")
        print(f"   {tool}: fine", flush=True)


if __name__ == "__main__":
    main()
