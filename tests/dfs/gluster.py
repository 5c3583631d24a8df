"""GlusterFS: three replicas, or three bricks without replicas, and two clients."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from xml.etree import ElementTree

from dfs.system import System, end, pid_in, run, wait_for

_BRICKS = ("1", "2", "3")


class Gluster(System):
    """Three replicas, each a brick: with one lost, the others go on."""

    packages = ("glusterfs-server",)
    programs = ("glusterd", "gluster")
    parts = _BRICKS
    volume, kind = "dcpx-replicated", ("replica", "3")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._daemon_file = folder / "glusterd.pid"

    def start(self) -> None:
        if not _answers():
            run("glusterd", "-p", self._daemon_file, "--logger=syslog")
        wait_for("glusterd", _answers)
        bricks = [f"{socket.gethostname()}:{self.folder}/brick{n}/data" for n in _BRICKS]
        for n in _BRICKS:
            (self.folder / f"brick{n}").mkdir()
        _gluster("create", self.volume, *self.kind, *bricks, "force")
        _gluster("start", self.volume)

    def stop(self) -> None:
        for verb in (["stop", self.volume, "force"], ["delete", self.volume]):
            run("gluster", "--mode=script", "volume", *verb, quiet=True)
        if (pid := pid_in(self._daemon_file)) is not None:
            end(pid)

    def mount(self, number: int) -> None:
        volume = f"{socket.gethostname()}:/{self.volume}"
        run("mount", "-t", "glusterfs", volume, self.mounts[number])

    def part_pid(self, part: str) -> int | None:
        host, path = socket.gethostname(), str(self.folder).strip("/").replace("/", "-")
        name = f"{host}-{path}-brick{part}-data.pid"
        return pid_in(Path(f"/var/run/gluster/vols/{self.volume}/{name}"))

    def bring_back(self, part: str) -> None:
        _gluster("start", self.volume, "force")
        wait_for(f"brick {part}", lambda: _bricks_online(self.volume) == len(_BRICKS))

    def settle(self) -> None:
        if not self.loses_files:  # with another brick lost before that, no good copy is left
            wait_for("the bricks to be healed", lambda: not _to_heal(self.volume))

    def limit(self, folder: str, nbytes: int | None) -> None:
        """Lets a directory have so many bytes; None: as many as there are."""
        if nbytes is None:
            _gluster("quota", self.volume, "remove", f"/{folder}")
            return
        if " on" not in _gluster("get", self.volume, "features.quota"):
            _gluster("quota", self.volume, "enable")
        for name in ("soft-timeout", "hard-timeout"):
            _gluster("quota", self.volume, name, "0")
        _gluster("quota", self.volume, "limit-usage", f"/{folder}", str(nbytes))


class GlusterDistributed(Gluster):
    """Each file lies on one brick: with that brick lost it is missing."""

    volume, kind = "dcpx-distributed", ()
    loses_files = True


def _answers() -> bool:
    return "Number of Peers" in run("gluster", "peer", "status", quiet=True)


def _bricks_online(volume: str) -> int:
    nodes = ElementTree.fromstring(_gluster("status", volume, "--xml")).iter("node")
    return sum(
        str(node.findtext("path")).startswith("/") and node.findtext("status") == "1"
        for node in nodes
    )


def _to_heal(volume: str) -> int:
    """Has a volume healed; returns how many files of it a brick has old, or not at all."""
    run("gluster", "volume", "heal", volume, quiet=True)
    numbers = re.findall(r"Number of entries: (\S+)", _gluster("heal", volume, "info"))
    return sum(int(number) if number.isdigit() else 1 for number in numbers)


def _gluster(verb: str, *arguments: str) -> str:
    return run("gluster", "--mode=script", "volume", verb, *arguments)
