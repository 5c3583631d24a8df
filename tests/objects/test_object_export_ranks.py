"""Several ranks export to one URL: each file by one rank, and all of them or none."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from object_exports import assert_equal, export, exported, names_at, tensors_of
from object_outcomes import MIB, objects_at
from support.machine import seconds
from support.object_proxy import FaultProxy
from support.object_requests import Request
from support.object_server import ObjectServer
from support.ranks import run_cases

pytestmark = pytest.mark.multirank

WORKER = Path(__file__).with_name("object_export_ranks_worker.py")
RANKS = 2


def test_ranks_upload_whole_files_of_one_artifact(
    object_server: ObjectServer, object_prefix: str, tmp_path: Path
) -> None:
    run_cases(WORKER, RANKS, "export", tmp_path, object_prefix)
    for name in ("same", "stored"):
        found, used = exported(object_server, f"{object_prefix}/{name}")
        assert_equal(found, tensors_of(1, 2 * MIB))
        assert names_at(object_server, f"{object_prefix}/{name}") == used
    found, _ = exported(object_server, f"{object_prefix}/stages")
    assert_equal(found, {f"stage{rank}": torch.full((50,), rank) for rank in range(RANKS)})


def test_what_no_rank_can_upload_is_refused_and_nothing_is_there(
    object_server: ObjectServer, object_prefix: str, tmp_path: Path
) -> None:
    run_cases(WORKER, RANKS, "refused", tmp_path, object_prefix)
    assert not object_server.keys(f"{object_prefix}/")


def test_failed_rank_leaves_no_shard_of_a_rank_that_uploads_still(
    object_server: ObjectServer, object_prefix: str, object_proxy: FaultProxy, tmp_path: Path
) -> None:
    export(tensors_of(1), object_prefix, "shards")
    old = objects_at(object_server, object_prefix)
    failed = threading.Event()

    def refuse(_: Request) -> str:
        failed.set()
        return "403"

    def wait_long(_: Request) -> None:
        failed.wait(seconds(120))
        threading.Event().wait(3)  # the coordinator gives up meanwhile

    object_proxy.hook("put_object", wait_long, key="00002-of-00002")
    object_proxy.hook("put_object", refuse, times=None, key="00001-of-00002")
    run_cases(WORKER, RANKS, "fail", tmp_path, object_prefix)
    assert failed.is_set()
    assert objects_at(object_server, object_prefix) == old
