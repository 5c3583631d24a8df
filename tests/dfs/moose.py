"""MooseFS: a master, two chunkservers with two copies of each chunk, and two clients."""

from __future__ import annotations

from pathlib import Path

from dfs.system import System, end, pid_in, run, wait_for

# The chunkservers refuse to be at 127.0.0.1; this one is given to the same device.
_ADDRESS = "10.77.0.1"
_OWNER = "WORKING_USER = root\nWORKING_GROUP = root\n"


class Moose(System):
    packages = ("moosefs-master", "moosefs-chunkserver", "moosefs-client", "moosefs-cli")
    programs = ("mfsmaster", "mfschunkserver", "mfsmount")
    parts = ("chunks1", "chunks2", "master")
    left_lock_s = 60  # SESSION_SUSTAIN_TIME; a day where nobody sets it

    def start(self) -> None:
        run("ip", "address", "replace", f"{_ADDRESS}/32", "dev", "lo")
        for name in ("master", "chunks1", "chunks2", "disk1", "disk2"):
            (self.folder / name).mkdir()
        exports = self.folder / "exports"
        exports.write_text("* / rw,alldirs,admin,maproot=0:0\n* . rw\n")
        (self.folder / "master" / "metadata.mfs").write_text("MFSM NEW")
        kept = f"SESSION_SUSTAIN_TIME = {self.left_lock_s}\n"
        hosts = "".join(f"MATO{to}_LISTEN_HOST = {_ADDRESS}\n" for to in ("ML", "CS", "CL"))
        self._configure(
            "master",
            f"EXPORTS_FILENAME = {exports}\n{kept}{hosts}",
        )
        for n in "12":
            disks = self.folder / f"disks{n}"
            disks.write_text(f"{self.folder}/disk{n}\n")
            self._configure(
                f"chunks{n}",
                f"HDD_CONF_FILENAME = {disks}\nHDD_LEAVE_SPACE_DEFAULT = 1GiB\n"
                f"MASTER_HOST = {_ADDRESS}\nBIND_HOST = {_ADDRESS}\n"
                f"CSSERV_LISTEN_HOST = {_ADDRESS}\nCSSERV_LISTEN_PORT = {9421 + int(n)}\n",
            )
        for part in ("master", "chunks1", "chunks2"):
            self.bring_back(part)

    def stop(self) -> None:
        for part in ("chunks1", "chunks2", "master"):
            if (pid := self.part_pid(part)) is not None:
                end(pid)
        run("ip", "address", "del", f"{_ADDRESS}/32", "dev", "lo", quiet=True)

    def mount(self, number: int) -> None:
        run("mfsmount", self.mounts[number], "-H", _ADDRESS, "-S", "/")
        if number == 0:
            run("mfssetgoal", "-r", "2", self.mounts[0])

    def part_pid(self, part: str) -> int | None:
        return pid_in(self._lock(part))

    def bring_back(self, part: str) -> None:
        program = "mfsmaster" if part == "master" else "mfschunkserver"
        restore = ["-a"] if part == "master" and self._lock(part).exists() else []
        run(program, *restore, "-c", self.folder / f"{part}.cfg", "start")
        servers = 2 if part == "chunks2" or self.part_pid("chunks2") is not None else 1
        if part != "master" or servers == 2:
            wait_for(part, lambda: _chunkservers() >= servers)

    def _configure(self, part: str, lines: str) -> None:
        text = f"{_OWNER}DATA_PATH = {self.folder}/{part}\n{lines}"
        (self.folder / f"{part}.cfg").write_text(text)

    def _lock(self, part: str) -> Path:
        name = ".mfsmaster.lock" if part == "master" else ".mfschunkserver.lock"
        return self.folder / part / name


def _chunkservers() -> int:
    return run("mfscli", "-H", _ADDRESS, "-SCS", quiet=True).count(_ADDRESS)
