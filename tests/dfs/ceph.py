"""Ceph: CephFS with two clients, its gateway of S3, and two mounts of that: rclone and s3fs."""

from __future__ import annotations

import os
import urllib.request
import uuid
from pathlib import Path

from dfs.system import System, end, pid_in, run, wait_for

_MONITOR, _GATEWAY = "127.0.0.1:6789", "127.0.0.1:7480"
GATEWAY = f"http://{_GATEWAY}"
KEY, SECRET, BUCKET = "dcpxkey", "dcpxsecret", "bucket"
# On a busy machine a command may ask the monitor before it knows which cluster it is of.
_TOO_EARLY = ("wrong fsid", "command descriptions")
_CONFIG = """[global]
fsid = {fsid}
mon_host = [v1:{monitor}]
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr2 = false
osd_pool_default_size = 2
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_crush_update_on_start = false
osd_objectstore = bluestore
bluestore_block_size = 8589934592
osd_memory_target = 939524096
osd_heartbeat_grace = 30
mon_data_avail_crit = 1
mon_data_avail_warn = 2
mds_beacon_grace = 60
run_dir = {folder}/run
pid_file = {folder}/run/$name.pid
admin_socket = {folder}/run/$name.$pid.asok
log_file = {folder}/log/$name.log
mon_data = {folder}/mon
mgr_data = {folder}/mgr
osd_data = {folder}/osd$id
mds_data = {folder}/mds
[client]
pid_file = {folder}/run/$name.$pid.pid
[client.rgw]
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint={gateway}
"""


class Ceph(System):
    """A monitor, a manager, two OSDs with two copies of each object, a metadata server."""

    packages = ("ceph-mon", "ceph-osd", "ceph-mgr", "ceph-mds", "ceph-fuse", "radosgw")
    programs = ("ceph-mon", "ceph-osd", "ceph-mgr", "ceph-mds", "ceph-fuse")
    parts = ("osd.0", "osd.1", "mds.a")
    left_lock_s = 300  # session_autoclose

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.config = folder / "ceph.conf"

    def start(self) -> None:
        for name in ("mon", "mgr", "osd0", "osd1", "mds", "rgw", "run", "log"):
            (self.folder / name).mkdir(parents=True)
        fsid = str(uuid.uuid4())
        self.config.write_text(
            _CONFIG.format(fsid=fsid, folder=self.folder, monitor=_MONITOR, gateway=_GATEWAY)
        )
        names = self.folder / "monitors"
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:{_MONITOR}]", names)
        self._daemon("ceph-mon", "--mkfs", "-i", "a", "--monmap", names)
        self._daemon("ceph-mon", "-i", "a")
        self._daemon("ceph-mgr", "-i", "x")
        for n in "01":
            identity = str(uuid.uuid4())
            self._ceph("osd", "new", identity)
            self._daemon("ceph-osd", "-i", n, "--mkfs", "--osd-uuid", identity)
            self._ceph("osd", "crush", "add", f"osd.{n}", "0.01", "root=default", f"host=h{n}")
            self._daemon("ceph-osd", "-i", n)
        for pool in ("meta", "data"):
            self._ceph("osd", "pool", "create", f"cephfs.{pool}", "8")
        self._ceph("fs", "new", "cephfs", "cephfs.meta", "cephfs.data")
        self.bring_back("mds.a")

    def stop(self) -> None:
        for file in sorted((self.folder / "run").glob("*.pid")):
            if (pid := pid_in(file)) is not None:
                end(pid)

    def mount(self, number: int) -> None:
        self._daemon("ceph-fuse", "--client_mountpoint", "/", self.mounts[number])

    def part_pid(self, part: str) -> int | None:
        return pid_in(self.folder / "run" / f"{part}.pid")

    def bring_back(self, part: str) -> None:
        kind, number = part.split(".")
        self._daemon(f"ceph-{kind}", "-i", number)
        if kind == "mds":
            wait_for("an active MDS", lambda: "up:active" in self._ceph("mds", "stat"))

    def _daemon(self, program: str, *arguments: str | Path) -> None:
        run(program, *arguments, "-c", self.config, again_on=_TOO_EARLY)

    def _ceph(self, *arguments: str) -> str:
        return run("ceph", "-c", self.config, *arguments, again_on=_TOO_EARLY)


class Gateway(System):
    """Ceph's gateway of S3, without a mount."""

    packages, programs = Ceph.packages, (*Ceph.programs, "radosgw")
    clients = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ceph = Ceph(folder / "ceph")

    def start(self) -> None:
        self.ceph.start()
        run("radosgw", "-c", self.ceph.config, "-n", "client.rgw")
        wait_for("the gateway", _answers)
        run(
            "radosgw-admin", "-c", self.ceph.config, "user", "create", "--uid=dcpx",
            "--display-name=dcpx", f"--access-key={KEY}", f"--secret={SECRET}",
        )  # fmt: skip
        make_bucket()

    def stop(self) -> None:
        self.ceph.stop()


class Rclone(Gateway):
    """rclone's mount of a bucket. What another client writes it sees after minutes."""

    packages = (*Gateway.packages, "rclone")
    programs = (*Gateway.programs, "rclone")
    clients = 1
    has_locks = False

    def mount(self, number: int) -> None:
        config = self.folder / "rclone.conf"
        config.write_text(
            f"[store]\ntype = s3\nprovider = Ceph\nendpoint = {GATEWAY}\n"
            f"access_key_id = {KEY}\nsecret_access_key = {SECRET}\n"
        )
        left = {name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"}
        run(
            "rclone", "mount", "--config", config, "--daemon", "--vfs-cache-mode", "writes",
            "--cache-dir", self.folder / "cache", f"store:{BUCKET}", self.mounts[number],
            env=left,
        )  # fmt: skip


class S3fs(Gateway):
    """s3fs's mount of a bucket. What another client writes it sees after minutes."""

    packages = (*Gateway.packages, "s3fs")
    programs = (*Gateway.programs, "s3fs")
    clients = 1
    has_locks = False

    def mount(self, number: int) -> None:
        keys = self.folder / "keys"
        keys.touch(mode=0o600)
        keys.write_text(f"{KEY}:{SECRET}\n")
        options = f"url={GATEWAY},use_path_request_style,passwd_file={keys},sigv2"
        run("s3fs", BUCKET, self.mounts[number], "-o", options)
        wait_for("s3fs", self.mounts[number].is_mount)


def environment() -> dict[str, str]:
    """Returns the variables by which s3:// is this gateway."""
    return {
        "AWS_ENDPOINT_URL": GATEWAY, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


def make_bucket() -> None:
    import boto3
    from botocore.config import Config

    boto3.client(
        "s3", endpoint_url=GATEWAY, aws_access_key_id=KEY, aws_secret_access_key=SECRET,
        region_name="us-east-1", config=Config(s3={"addressing_style": "path"}),
    ).create_bucket(Bucket=BUCKET)  # fmt: skip


def _answers() -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(GATEWAY, timeout=5):
            return True
    except OSError:
        return False
