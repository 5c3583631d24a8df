"""What a URL may be, where its store is, and who may use it; no refusal shows a secret."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from object_outcomes import Store, retries
from support.object_fixture import enter, s3_alone
from support.small_managers import manager_of

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
from torch_dcpx.cli.app import app
from torch_dcpx.storage import object_store
from torch_dcpx.storage.object_url import ObjectUrl, location_of

STATE = {"w": torch.arange(100), "step": 3}
CALLS: list[Callable[[Any], object]] = [
    DcpxWriter,
    DcpxReader,
    lambda url: DcpxWriter("x").reset(url),
    lambda url: DcpxReader("x").reset(url),
    lambda url: dcpx.save(STATE, url),
    lambda url: dcpx.async_save(STATE, url),
    lambda url: dcpx.load(dict(STATE), url),
    lambda url: manager_of(url).resume(state=dict(STATE)),
    CheckpointManager,
    dcpx.verify,
    dcpx.repair,
    lambda url: dcpx.export(url, "out"),
    lambda url: dcpx.export(STATE, url),
]
_COMMANDS = ("ls", "verify", "inspect", "doctor", "gc", "repair", "cat")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- Refused ------------------------------------------------------------------------------------

# URL -> what is said of it
_OF_NO_CHECKPOINT = {
    "s3://": "names no bucket",
    "s3:///run": "names no bucket",
    "s3://bucket": "names a whole bucket",
    "s3://bucket/": "names a whole bucket",
    "s3://bucket//run": "empty part",
    "s3://bucket/run/../other": "'..'",
    "s3://bucket/./run": "'.'",
    "s3://bucket/a\nb": "not printable",
    "s3://bucket/a\0b": "not printable",
    "az://": "names no container: az://container/prefix",
    "az://container/": "names a whole container",
    "az://container//run": "empty part",
}
_WITH_SECRETS = (
    "s3://key:hunter2@bucket/run",
    "s3:///key:hunter2@bucket/run",
    "s3://bucket/run?hunter2=1",
    "s3://bucket/run#hunter2",
    "s3://AKIAKEY:hun/hunter2@bucket/run",
    "s3://AKIAKEY:hunter2/run",
    "s3://bucket/run?sig=hunter2",
    "az://container@hunter2.blob.core.windows.net/run",
    "az://container/run?sv=1&sig=hunter2",
    "https://user:hunter2@host/run",
    "https://user:pa/hunter2@host/run",
    "https://user:pa?hunter2@host/run",
    "https://b.s3.amazonaws.com/run?X-Amz-Credential=AKIA&X-Amz-Signature=hunter2",
    "https://host/run#hunter2",
    "S3://AKIAKEY:hunter2@bucket/run",
    "S3://AKIAKEY:hun/hunter2@bucket/run",
    "gs://user:hunter2@b/x",
    "user:hunter2@s3://b/x",
)
_OF_OTHER_STORES = ("gs://bucket/run", "abfs://bucket/run", "S3://bucket/run")


@s3_alone
@pytest.mark.parametrize("call", CALLS)
def test_url_of_no_checkpoint_or_of_another_store_is_refused(
    store: Store, call: Callable[[Any], object]
) -> None:
    for url, words in _OF_NO_CHECKPOINT.items():
        with pytest.raises(OptionError) as caught:
            call(url)
        assert words in str(caught.value), url
    for url in _OF_OTHER_STORES:
        with pytest.raises(UnsupportedError) as refused:
            call(url)
        assert f"{url}' is a URL" in str(refused.value)


@s3_alone
@pytest.mark.parametrize("call", CALLS)
def test_url_with_more_than_a_place_is_refused_and_its_secret_not_told(
    store: Store, call: Callable[[Any], object]
) -> None:
    for url in _WITH_SECRETS:
        with pytest.raises((UnsupportedError, OptionError)) as caught:
            call(url)
        assert isinstance(caught.value, UnsupportedError) or not url.startswith(("s3:", "az:"))
        shown = f"{caught.value} {caught.value!r} {vars(caught.value)}"
        assert "hunter2" not in shown, (url, shown)


@pytest.mark.parametrize("command", _COMMANDS)
def test_command_refuses_a_url_that_is_none_of_ours_and_tells_no_secret(command: str) -> None:
    told = {
        "s3://bucket": "whole bucket",
        "gs://bucket/run": "is a URL",
        "s3://key:hunter2@bucket/run": "with a user or a password",
        "s3://bucket/run?hunter2=3": "a query",
        **dict.fromkeys(_WITH_SECRETS, ""),
    }
    for url, words in told.items():
        result = CliRunner().invoke(app, [command, url])
        assert result.exit_code == 2 and words in result.output, (url, result.output)
        assert "hunter2" not in result.output, (url, result.output)


def test_endpoint_that_is_refused_shows_no_secret() -> None:
    for endpoint in (
        "http://user:hunter2@h", "user:hunter2@h", "S3://h?sig=hunter2", "http://h#hunter2",
    ):  # fmt: skip
        with pytest.raises(OptionError) as caught:
            WriteOptions(endpoint=endpoint)
        assert "hunter2" not in f"{caught.value!r} {vars(caught.value)}"


def test_without_obstore_the_package_that_is_missing_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for call in CALLS:
        with pytest.raises(UnsupportedError, match="pip install obstore"):
            call(store.url)


# ---- Places and endpoints -----------------------------------------------------------------------


def test_slash_at_the_end_names_the_same_place(store: Store) -> None:
    dcpx.save(STATE, f"{store.url}/")
    target = {"w": torch.zeros(100, dtype=torch.int64), "step": 0}
    dcpx.load(target, store.url)
    assert torch.equal(target["w"], STATE["w"])  # type: ignore[arg-type]
    assert DcpxReader(f"{store.url}/").path == store.url


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


def test_endpoint_is_an_option_and_comes_before_all_variables(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, store.server.environment("http://127.0.0.1:9"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setattr(object_store, "_CLIENT", {"retry_config": {"max_retries": 0}})
    with retries(0), pytest.raises(StorageError):
        dcpx.save(STATE, store.url)
    options = WriteOptions(endpoint=store.server.url)
    dcpx.async_save(STATE, store.url, options=options).result()
    writer = pickle.loads(pickle.dumps(DcpxWriter(store.url, options=options)))
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    target = {"w": torch.zeros(100, dtype=torch.int64), "step": 0}
    dcpx.load(target, store.url, options=ReadOptions(endpoint=store.server.url))
    assert target["step"] == 3


def test_forked_child_of_a_user_of_a_store_is_told(store: Store) -> None:
    dcpx.save(STATE, store.url)
    pid = os.fork()
    if pid == 0:  # no test's code may run on in it
        try:
            dcpx.save(STATE, store.url)
        except UnsupportedError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    dcpx.save(STATE, store.url)


@s3_alone
def test_hook_makes_dcps_classes_for_urls_ours(store: Store) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    with dcpx.use():
        made = FsspecWriter(store.url, sync_files=False, thread_count=2, overwrite=False)
        assert type(made) is DcpxWriter and made.path == store.url
        assert (made.overwrite, made.options.durability) == (False, "full")
        assert type(FsspecReader(store.url)) is DcpxReader
        dcp.save(STATE, checkpoint_id=store.url, no_dist=True)
        target = {"w": torch.zeros(100, dtype=torch.int64), "step": 0}
        dcp.load(target, checkpoint_id=store.url, no_dist=True)
        assert target["step"] == 3
        with pytest.raises(dcp.api.CheckpointException, match="already exists"):
            dcp.save(STATE, storage_writer=made, no_dist=True)
        for other in (
            FsspecWriter("memory://x"),
            FsspecReader("memory://x"),
            FsspecWriter(store.url, anon=True),
            FsspecReader(store.url, anon=True),
        ):
            assert type(other).__name__.startswith("Fsspec")
    assert type(FsspecReader(store.url)) is FsspecReader
    assert FsspecReader.validate_checkpoint_id("memory://x")
    assert not FsspecReader.validate_checkpoint_id("nothing://x")
