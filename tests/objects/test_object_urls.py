"""What a URL may be, where its store is, and who may use it."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.machine import seconds
from support.object_fixture import s3_alone

import torch_dcpx as dcpx
from torch_dcpx import (
    CheckpointManager,
    DcpxReader,
    DcpxWriter,
    OptionError,
    ReadOptions,
    StorageError,
    UnsupportedError,
    WriteOptions,
)
from torch_dcpx.storage import object_store
from torch_dcpx.storage.object_url import ObjectUrl, location_of

if TYPE_CHECKING:
    from support.object_server import ObjectServer

STATE = {"w": torch.arange(100), "step": 3}
CALLS: list[Callable[[Any], object]] = [
    DcpxWriter,
    DcpxReader,
    lambda url: DcpxWriter("x").reset(url),
    lambda url: DcpxReader("x").reset(url),
    lambda url: dcpx.save(STATE, url),
    lambda url: dcpx.async_save(STATE, url),
    lambda url: dcpx.load(dict(STATE), url),
    CheckpointManager,
    dcpx.verify,
    dcpx.repair,
    lambda url: dcpx.export(url, "out"),
    lambda url: dcpx.export(STATE, url),
]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "names no bucket"),
        ("s3:///run", "names no bucket"),
        ("s3://bucket", "names a whole bucket"),
        ("s3://bucket/", "names a whole bucket"),
        ("s3://bucket//run", "empty part"),
        ("s3://bucket/run/../other", "'..'"),
        ("s3://bucket/./run", "'.'"),
        ("s3://bucket/a\nb", "not printable"),
        ("s3://bucket/a\0b", "not printable"),
        ("az://", "names no container: az://container/prefix"),
        ("az://container/", "names a whole container"),
        ("az://container//run", "empty part"),
    ],
)
@s3_alone
def test_url_of_no_checkpoint_is_refused(
    object_prefix: str, call: Callable[[Any], object], url: str, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        call(url)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/run",
        "s3:///key:secret@bucket/run",
        "s3://bucket/run?secret=1",
        "s3://bucket/run#secret",
        "az://container@secret.blob.core.windows.net/run",
        "az://container/run?sv=1&sig=secret",
    ],
)
@s3_alone
def test_url_with_more_than_a_place_is_refused_and_its_secret_not_told(
    object_prefix: str, call: Callable[[Any], object], url: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        call(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("url", ["gs://bucket/run", "abfs://bucket/run", "S3://bucket/run"])
def test_other_stores_are_refused_by_name(call: Callable[[Any], object], url: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{url}' is a URL"):
        call(url)


def test_slash_at_the_end_and_bytes_name_the_same_place(object_prefix: str) -> None:
    dcpx.save(STATE, f"{object_prefix}/")
    target = {"w": torch.zeros(100, dtype=torch.int64), "step": 0}
    dcpx.load(target, object_prefix)
    assert torch.equal(target["w"], STATE["w"])
    assert DcpxReader(f"{object_prefix}/").path == object_prefix


def test_location_behaves_as_a_path() -> None:
    url = location_of("s3://bucket/run/step-1/")
    assert isinstance(url, ObjectUrl)
    assert str(url) == os.fspath(url) == "s3://bucket/run/step-1"
    assert (url.name, str(url / ".metadata")) == ("step-1", "s3://bucket/run/step-1/.metadata")
    assert (url / "x").is_relative_to(url) and str((url / "x").relative_to(url)) == "x"
    assert not url.is_relative_to(ObjectUrl("s3", "bucket", "run/step"))
    assert {url: 1}[ObjectUrl("s3", "bucket", "run/step-1")] == 1
    assert url != ObjectUrl("s3", "bucket", "run/step-1", "http://x")
    assert url.is_absolute() and location_of(url) is url
    other = location_of("az://bucket/run/step-1")
    assert str(other) == "az://bucket/run/step-1" and other != url
    assert not (other / "x").is_relative_to(url)


def test_endpoint_is_an_option(
    object_prefix: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_server.environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "_CLIENT", {"retry_config": {"max_retries": 0}})
    with pytest.raises(StorageError):
        dcpx.save(STATE, object_prefix)
    options = WriteOptions(endpoint=object_server.url)
    handle = dcpx.async_save(STATE, object_prefix, options=options)
    handle.result()
    writer = pickle.loads(pickle.dumps(DcpxWriter(object_prefix, options=options)))
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    target = {"w": torch.zeros(100, dtype=torch.int64), "step": 0}
    dcpx.load(target, object_prefix, options=ReadOptions(endpoint=object_server.url))
    assert target["step"] == 3


def test_without_obstore_the_package_that_is_missing_is_named(
    object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for call in CALLS:
        with pytest.raises(UnsupportedError, match="pip install obstore"):
            call(object_prefix)


def test_errors_of_the_store_have_no_secrets(
    object_prefix: str, object_server: ObjectServer
) -> None:
    url = location_of(object_prefix)
    assert isinstance(url, ObjectUrl)
    bucket = object_store.bucket_of(url)
    exceptions: Any = importlib.import_module("obstore.exceptions")
    text = (
        "Server returned 403: <AWSAccessKeyId>AKIAWHATEVER</AWSAccessKeyId> "
        "https://me:hunter2@h/b?X-Amz-Credential=AKIAWHATEVER%2Fx&X-Amz-Signature=deadbeef"
        "&partNumber=1 "
        'aws_secret_access_key: "hunter2" x-amz-security-token: FwoToken\n\nDebug source: hunter3'
    )
    if object_server.scheme == "az":
        text = (
            "https://me:hunter2@a.blob.core.windows.net/c/b?sv=2023&sig=AKIAWHATEVER&partNumber=1 "
            "The MAC signature found in the HTTP request 'deadbeef=' is not the same: "
            "Authorization: SharedKey tests:FwoToken, account_key=hunter2 bearer FwoToken"
        )
    with pytest.raises(StorageError) as caught, bucket.errors("get", "k"):
        raise exceptions.GenericError(text)
    for secret in ("AKIAWHATEVER", "deadbeef", "hunter2", "hunter3", "FwoToken"):
        assert secret not in str(caught.value) + repr(caught.value.__cause__)
    assert caught.value.__cause__ is None and "partNumber=1" in str(caught.value)


FORK = """
import os, sys
import torch, torch_dcpx as dcpx
from torch_dcpx import UnsupportedError
url = sys.argv[1]
dcpx.save({"w": torch.ones(3)}, url)
pid = os.fork()
if pid == 0:
    try:
        dcpx.save({"w": torch.ones(3)}, url)
    except UnsupportedError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
dcpx.save({"w": torch.ones(3)}, url)
"""


def test_forked_child_of_a_user_of_a_store_is_told(object_prefix: str) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", FORK, object_prefix],
        timeout=seconds(300),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@s3_alone
def test_hook_makes_dcps_classes_for_urls_ours(object_prefix: str) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    with dcpx.use():
        made = FsspecWriter(object_prefix, sync_files=False, thread_count=2, overwrite=False)
        assert type(made) is DcpxWriter and made.path == object_prefix
        assert (made.overwrite, made.options.durability) == (False, "full")
        assert type(FsspecReader(object_prefix)) is DcpxReader
        dcp.save(STATE, checkpoint_id=object_prefix, no_dist=True)
        target = {"w": torch.zeros(100, dtype=torch.int64), "step": 0}
        dcp.load(target, checkpoint_id=object_prefix, no_dist=True)
        assert target["step"] == 3
        with pytest.raises(dcp.api.CheckpointException, match="already exists"):
            dcp.save(STATE, storage_writer=made, no_dist=True)
        for other in (
            FsspecWriter("memory://x"),
            FsspecReader("memory://x"),
            FsspecWriter(object_prefix, anon=True),
            FsspecReader(object_prefix, anon=True),
        ):
            assert type(other).__name__.startswith("Fsspec")
    assert type(FsspecReader(object_prefix)) is FsspecReader
    assert FsspecReader.validate_checkpoint_id("memory://x")
    assert not FsspecReader.validate_checkpoint_id("nothing://x")


def test_overwrite_false_keeps_what_is_there(
    object_prefix: str, object_server: ObjectServer
) -> None:
    dcpx.save(STATE, object_prefix)
    before = object_server.keys(object_prefix)
    with pytest.raises(RuntimeError, match="already exists"):
        dcpx.save(STATE, storage_writer=DcpxWriter(object_prefix, overwrite=False))
    assert object_server.keys(object_prefix) == before
