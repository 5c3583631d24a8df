"""Builds the wheels of one commit, for each Python and machine, and looks at each of them.

A wheel comes from the commit, never from the working tree; its files have the commit's time, and
nothing in it depends on the folder, so that whoever builds the commit again gets the same bytes.

    python requirements/wheels.py --out dist/wheels [--commit HEAD] [--work build/wheels]
        [--pythons python3.10 ...]  (3.10 to 3.13, each from PATH or pyenv)
        [--machines x86_64 aarch64]

Run by `make wheels`, in an environment with requirements/wheels.txt. Needs nvcc and the headers of
each Python. Writes the wheels and SHA256SUMS into --out, which is made anew.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
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
FATBIN = bytes.fromhex("50ed55ba")  # the first bytes of the pack kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--pythons", nargs="+", default=VERSIONS)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    options = parser.parse_args()

    pythons = [find_python(name) for name in options.pythons]
    commit, seconds = git("show", "-s", "--format=%H %ct", options.commit).decode().split()
    print(f"== wheels of {commit}", flush=True)
    if git("status", "--porcelain", "--untracked-files=no"):
        print("   changes that are not committed are left out", flush=True)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    source = options.work.resolve() / "source"
    wheels = []
    for python, version in pythons:
        builder = environment(python, version)
        for machine in options.machines:
            export(commit, source)
            wheel = build(builder, source, machine, seconds, options.out.resolve())
            complaints = audit(wheel, version, machine, [str(source), str(ROOT)])
            if complaints:
                raise SystemExit("\n".join([f"{wheel.name} is no release:", *complaints]))
            wheels.append(wheel)
    for tool in ("auditwheel show", "twine check --strict", "check-wheel-contents"):
        look_at(tool, wheels)
    sums = [f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in wheels]
    (options.out / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="", flush=True)


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def find_python(name: str) -> tuple[str, str]:
    """Returns the Python of a version or path that runs, and its version."""
    candidates = [name]
    if name in VERSIONS:
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        candidates = [f"python{name}", *map(str, root.glob(f"versions/{name}.*/bin/python"))]
    for candidate in candidates:
        ask = "import sys; print('%d.%d' % sys.version_info[:2], getattr(sys, 'abiflags', ''))"
        try:
            said = subprocess.run([candidate, "-c", ask], capture_output=True, text=True).stdout
        except OSError:
            continue
        if said.split() in [[version] for version in VERSIONS]:
            return candidate, said.split()[0]
    raise SystemExit(f"no Python {name} on PATH or under pyenv (wheels are for {VERSIONS})")


def environment(python: str, version: str) -> Path:
    """Returns the Python of an environment of that version with the build's tools."""
    folder = ROOT / ".venv-wheels" / version
    builder, stamp = folder / "bin" / "python", folder / "ready.txt"
    requirements = ROOT / "requirements" / "wheels.txt"
    if not stamp.is_file() or stamp.read_bytes() != requirements.read_bytes():
        print(f"== an environment for {python} (once)", flush=True)
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        install = ["-m", "pip", "install", "-q", "-r", str(requirements)]
        subprocess.run([builder, *install], check=True)
        shutil.copyfile(requirements, stamp)
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
    settings = {"DCPX_TARGET": target, "DCPX_CUDA": "1", "SOURCE_DATE_EPOCH": seconds}
    command = [builder, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"]
    before = set(out.iterdir())
    subprocess.run(
        [*command, "-w", out, "."],
        cwd=source,
        env={**os.environ, **settings, "DCPX_SANITIZE": ""},
        umask=0o022,
        check=True,
    )
    (wheel,) = set(out.iterdir()) - before
    return wheel


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
    if email.message_from_bytes(files[described])["Tag"] != tag:
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
    if any(tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH") for tag in dynamic.iter_tags()):
        yield "has a path to libraries"
    symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
    exported = [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s.name]
    if exported != ["PyInit__C"]:
        yield f"exports {len(exported)} symbols: {exported[:3]}"
    newest = max(_glibc_versions(elf), default=(0, 0))
    if newest > GLIBC:
        yield f"needs glibc {newest[0]}.{newest[1]}"
    if elf.get_section_by_name(".debug_info") is not None:
        yield "has debug information"
    if FATBIN not in data:
        yield "has no pack kernel"


def _glibc_versions(elf: ELFFile) -> Iterator[tuple[int, ...]]:
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    if version.name.startswith("GLIBC_"):
                        yield tuple(map(int, version.name[6:].split(".")))


def look_at(tool: str, wheels: list[Path]) -> None:
    """Lets another's tool look at all wheels, one by one."""
    name, *arguments = tool.split()
    for wheel in wheels:
        command = [str(Path(sys.executable).parent / name), *arguments, str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True)
        said = f"{done.stdout}{done.stderr}".strip()
        if done.returncode != 0:
            raise SystemExit(f"{tool} {wheel.name} ({done.returncode}):\n{said}")
        print(f"{tool}: {' '.join(said.split())[:160]}", flush=True)


if __name__ == "__main__":
    main()
