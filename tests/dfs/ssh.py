"""sshfs: two clients of a directory, by an sshd of the tests' own."""

from __future__ import annotations

from pathlib import Path

from dfs.system import System, end, pid_in, run, wait_for

_PORT = 2222


class Ssh(System):
    packages = ("sshfs", "openssh-server")
    programs = ("sshfs", "ssh-keygen")
    parts = ("server",)
    has_locks = False
    late_s = 22.0  # its cache: 20, and the kernel's

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        (self.folder / "data").mkdir()
        keys = self.folder / "keys"
        keys.mkdir(mode=0o700)
        for name in ("host", "user"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name)
        (keys / "allowed").write_bytes((keys / "user.pub").read_bytes())
        (keys / "config").write_text(
            f"Port {_PORT}\nListenAddress 127.0.0.1\nHostKey {keys}/host\n"
            f"AuthorizedKeysFile {keys}/allowed\nPidFile {keys}/pid\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n"
        )
        self.bring_back("server")

    def stop(self) -> None:
        if (pid := pid_in(self.folder / "keys" / "pid")) is not None:
            end(pid)

    def mount(self, number: int) -> None:
        keys = self.folder / "keys"
        known = f"StrictHostKeyChecking=no,UserKnownHostsFile={keys}/hosts"
        options = f"IdentityFile={keys}/user,{known}"
        where = f"root@127.0.0.1:{self.folder}/data"
        run("sshfs", "-p", str(_PORT), "-o", options, where, self.mounts[number])

    def bring_back(self, part: str) -> None:
        run("/usr/sbin/sshd", "-f", self.folder / "keys" / "config")
        wait_for("sshd", lambda: pid_in(self.folder / "keys" / "pid"))
