"""The file systems of `make test-dfs`, each started once, for all tests that run on it.

@on("gluster", "cephfs")        # a test of `system` runs on these, as far as DCPX_DFS names them
def test_it(system, place):     # system: running; place: a name of a new directory in it
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from dfs.ceph import Ceph, Gateway, Rclone, S3fs
from dfs.gluster import Gluster, GlusterDistributed
from dfs.moose import Moose
from dfs.ssh import Ssh
from dfs.system import System

SYSTEMS: dict[str, type[System]] = {
    "gluster": Gluster,
    "gluster-distributed": GlusterDistributed,
    "moosefs": Moose,
    "sshfs": Ssh,
    "cephfs": Ceph,
    "rgw": Gateway,
    "rclone": Rclone,
    "s3fs": S3fs,
}
TWO_CLIENTS = [name for name, kind in SYSTEMS.items() if kind.clients == 2]
REDUNDANT = ["gluster", "moosefs", "cephfs"]
MOUNTED = [name for name, kind in SYSTEMS.items() if kind.clients]
_LOCK = Path("/run/lock/dcpx-test-dfs")


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("system", names, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = os.environ["DCPX_DFS"].replace(",", " ").split()
    assert wanted == ["all"] or set(wanted) <= set(SYSTEMS), f"{wanted}: not all of {[*SYSTEMS]}"
    left = [one for one in items if wanted != ["all"] and _system_of(one) not in (*wanted, "")]
    config.hook.pytest_deselected(items=left)
    items[:] = [one for one in items if one not in left]


def _system_of(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return str(call.params.get("system", "")) if call is not None else ""


@pytest.fixture(scope="session")
def _alone() -> Iterator[None]:
    """Fails while another run has these file systems: they share ports and daemons."""
    with _LOCK.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pytest.exit(f"another `make test-dfs` runs: process {file.read()} ({_LOCK})", 3)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@pytest.fixture(scope="session")
def system(
    request: pytest.FixtureRequest, _alone: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[System]:
    kind = SYSTEMS[request.param]
    with kind(tmp_path_factory.mktemp(request.param) / "fs").running() as running:
        yield running


@pytest.fixture
def place() -> str:
    """A name that no test has used."""
    return f"dcpx-{uuid.uuid4().hex[:12]}"
