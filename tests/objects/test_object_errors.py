"""What a store says reaches the user: its own code first, then the URL once, and no secret."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from object_managers import manager_of
from object_outcomes import LARGE_NUMEL, retries, save, state_of
from support.object_fixture import enter, s3_alone
from support.object_proxy import FaultProxy
from support.object_server import ObjectServer

import torch_dcpx as dcpx
from torch_dcpx import OptionError, StorageError, UnsupportedError, WriteOptions
from torch_dcpx.cli.app import app
from torch_dcpx.storage import object_services
from torch_dcpx.storage.object_errors import said
from torch_dcpx.storage.object_services import SERVICES

STATE = {"w": torch.ones(3)}
CALLS: dict[str, Callable[[str], object]] = {
    "save": lambda url: dcpx.save(STATE, url, no_dist=True),
    "save at once": lambda url: save(STATE, url, conditional_commit=False),
    "load": lambda url: dcpx.load(dict(STATE), url, no_dist=True),
    "resume": lambda url: manager_of(url).resume(state=dict(STATE)),
    "verify": dcpx.verify,
}
_XML = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>{}</Message>'
_GET = (
    "Error performing GET http://127.0.0.1:7490/bucket/p/a?X-Amz-Signature=hunter2 in 4.26382ms, "
    "after 10 retries, max_retries: 10, retry_timeout: 180s - Server returned non-2xx status code: "
)
_SENT = (
    "Error performing {} http://user:hunter2@hunter2@127.0.0.1:9/bucket/x?uploadId=1 in 1.2s, "
    "after 3 retries, max_retries: 3, retry_timeout: 180s  - HTTP error: error sending request"
    '\n\nDebug source:\nGeneric {{ Os {{ code: 111, message: "Connection refused", }} }}'
)


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (
            "GenericError",
            f"Generic S3 error: Error performing list request: {_GET}403 Forbidden: "
            + _XML.format("InvalidAccessKeyId", ""),  # as RGW
            (errno.EACCES, "InvalidAccessKeyId", "403 Forbidden"),
        ),
        (
            "PermissionDeniedError",
            f"The operation lacked the necessary privileges for path p/a: {_GET}403 Forbidden: "
            + _XML.format("RequestTimeTooSkewed", "The difference is &lt;too&gt; large."),
            (errno.EACCES, "RequestTimeTooSkewed", "The difference is <too> large."),
        ),
        (
            "GenericError",
            f"Generic S3 error: {_GET}400 Bad Request: {_XML.format('ExpiredToken', 'Expired.')}",
            (errno.EACCES, "ExpiredToken", "Expired."),
        ),
        (
            "GenericError",
            f"Generic S3 error: {_GET}400 Bad Request: {_XML.format('RequestTimeout', 'Slow.')}",
            (errno.EIO, "RequestTimeout", "Slow."),
        ),
        (
            "FileNotFoundError",
            f"Object at location p/a not found: {_GET}404 Not Found: "
            + _XML.format("NoSuchBucket", ""),
            (errno.ENXIO, "NoSuchBucket", "there is no such bucket"),
        ),
        (
            "FileNotFoundError",
            f"Object at location p/a not found: {_GET}404 Not Found: "
            + _XML.format("NoSuchKey", "The specified key does not exist."),
            (errno.ENOENT, "", "No such file or directory"),
        ),
        (
            "FileNotFoundError",
            f"Object at location p/a not found: {_GET}404 Not Found: "
            + _XML.format("NoSuchUpload", "The upload does not exist."),
            (errno.ENOENT, "NoSuchUpload", "The upload does not exist."),
        ),
        (
            "GenericError",
            f"Generic MicrosoftAzure error: {_GET}403 Forbidden: <Error>\n  "
            "<Code>AuthorizationFailure</Code>\n  <Message>Not so.\nRequestId:1\nTime:2</Message>",
            (errno.EACCES, "AuthorizationFailure", "Not so."),
        ),
        (
            "GenericError",
            f"Generic S3 error: {_GET}503 Service Unavailable: go to http://a:hunter2@b/c?d",
            (errno.EIO, "", "503 Service Unavailable: go to http://b"),
        ),
        (
            "GenericError",
            "Generic S3 error: " + _SENT.format("PUT"),
            (errno.EIO, "", "no answer from http://127.0.0.1:9: Connection refused (3 retries)"),
        ),
        (
            "GenericError",
            "Generic S3 error: Error performing GET http://h/b in 9.6µs - Received redirect "
            "without LOCATION, this normally indicates an incorrectly configured region",
            (errno.EINVAL, "", "the bucket lies in another region: set AWS_REGION"),
        ),
    ],
)
def test_error_of_obstore_is_told_by_its_code(
    kind: str, text: str, expected: tuple[int, str, str]
) -> None:
    exceptions: Any = importlib.import_module("obstore.exceptions")
    error = (
        FileNotFoundError(text) if kind == "FileNotFoundError" else getattr(exceptions, kind)(text)
    )
    assert tuple(said(error, SERVICES["s3"])) == expected


def test_upload_that_could_not_be_ended_is_told_as_that() -> None:
    exceptions: Any = importlib.import_module("obstore.exceptions")
    number, _, text = said(exceptions.GenericError(_SENT.format("DELETE")), SERVICES["s3"])
    assert number == errno.EIO and text == (
        "the upload ended early, its parts stay until a rule of the bucket removes them: no answer "
        "from http://127.0.0.1:9: Connection refused (3 retries)"
    )


@s3_alone
def test_upload_that_a_dying_gateway_ends_is_told_as_that(
    object_prefix: str, object_proxy: FaultProxy
) -> None:
    object_proxy.fail("upload_part", "reset", times=None)
    object_proxy.fail("abort_upload", "reset", times=None)
    with retries(1), pytest.raises(StorageError) as caught:
        save(state_of(1, LARGE_NUMEL), object_prefix)
    text = str(caught.value)
    assert "no answer from http://127.0.0.1" in text and "(1 retry)" in text
    assert "DELETE" not in text and "uploadId" not in text and text.count("s3://") == 1


@pytest.mark.parametrize("call", CALLS)
def test_bucket_that_is_not_there_is_named(
    object_server: ObjectServer, object_prefix: str, call: str
) -> None:
    code = {"s3": "NoSuchBucket", "az": "ContainerNotFound"}[object_server.scheme]
    url = f"{object_server.scheme}://nothere/run"
    with retries(0), pytest.raises(StorageError, match=f"^{code}: .*there is no such") as caught:
        CALLS[call](url)
    assert caught.value.errno == errno.ENXIO and str(caught.value).count("://") == 1
    result = CliRunner().invoke(app, ["doctor", url])
    assert result.exit_code == 2 and f"{code}: list '{url}'" in result.output


@pytest.mark.parametrize("call", CALLS)
def test_refusal_is_told_by_the_stores_code_and_our_url_once(
    object_prefix: str, object_proxy: FaultProxy, call: str
) -> None:
    """Also of a HEAD, whose answer has no words."""
    object_proxy.fail("any", "403", times=None)
    with retries(0), pytest.raises(StorageError, match=r"^AccessDenied: ") as caught:
        CALLS[call](object_prefix)
    text = str(caught.value)
    assert caught.value.errno == errno.EACCES
    assert text.count("://") == 1 and text.endswith("': Access Denied"), text
    assert "http" not in text and object_prefix in text


TOLD = {"400": ("ExpiredToken", errno.EACCES), "503": ("SlowDown", errno.EIO)}


@s3_alone
@pytest.mark.parametrize("fault", TOLD)
def test_code_of_the_store_is_told_where_head_is_asked(
    object_prefix: str, object_proxy: FaultProxy, fault: str
) -> None:
    """Its answer has a status alone: GET is asked once."""
    object_proxy.fail("any", fault, times=None)
    with retries(0), pytest.raises(StorageError, match=f"^{TOLD[fault][0]}: get 's3:") as caught:
        CALLS["save at once"](object_prefix)
    assert caught.value.errno == TOLD[fault][1]
    kinds = [one.kind for one in object_proxy.requests()]
    assert kinds[:2] == ["head_object", "get_object"] and kinds.count("get_object") == 1


@s3_alone
@pytest.mark.parametrize("fault", TOLD)
def test_code_of_the_store_is_told_of_an_end_that_is_asked_for(
    object_prefix: str, object_proxy: FaultProxy, fault: str
) -> None:
    """HEAD, which is asked whether the object is empty, does not hide it."""
    save(STATE, object_prefix)
    for kind in ("get_object", "head_object"):
        object_proxy.fail(kind, fault, times=None, key="/__0_")
    with retries(0), pytest.raises(StorageError, match=f"^{TOLD[fault][0]}: get 's3:"):
        CALLS["load"](object_prefix)


@s3_alone
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("has_id", [False, True])
def test_missing_credentials_are_told(
    object_prefix: str, monkeypatch: pytest.MonkeyPatch, call: str, *, has_id: bool
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    if not has_id:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # of roles
    with retries(0), pytest.raises(StorageError) as caught:
        CALLS[call](object_prefix)
    text = str(caught.value)
    assert "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in text, text
    assert "~/.aws is not read" in text and "aws configure export-credentials" in text
    assert caught.value.errno == errno.EACCES


# ---- Secrets ------------------------------------------------------------------------------------

URLS = (
    "https://user:hunter2@host/run",
    "https://user:pa/hunter2@host/run",
    "https://user:pa?hunter2@host/run",
    "https://b.s3.amazonaws.com/run?X-Amz-Credential=AKIA&X-Amz-Signature=hunter2",
    "https://host/run#hunter2",
    "S3://AKIAKEY:hunter2@bucket/run",
    "S3://AKIAKEY:hun/hunter2@bucket/run",
    "s3://AKIAKEY:hunter2@bucket/run",
    "s3://AKIAKEY:hun/hunter2@bucket/run",
    "s3://AKIAKEY:hunter2/run",
    "s3://bucket/run?sig=hunter2",
    "gs://user:hunter2@b/x",
    "az://container/run?sig=hunter2",
    "user:hunter2@s3://b/x",
)


@pytest.mark.parametrize("url", URLS)
def test_url_that_is_refused_shows_no_secret(url: str) -> None:
    calls: dict[str, Callable[[str], object]] = {
        **CALLS,
        "reader": dcpx.DcpxReader,
        "writer": dcpx.DcpxWriter,
        "export": lambda url: dcpx.export(STATE, url),
        "export from": lambda url: dcpx.export(url, "out"),
        "manager": dcpx.CheckpointManager,
        "repair": dcpx.repair,
    }
    for name, call in calls.items():
        with pytest.raises((UnsupportedError, OptionError)) as caught:
            call(url)
        shown = f"{caught.value} {caught.value!r} {vars(caught.value)}"
        assert "hunter2" not in shown, (name, shown)
    for command in ("ls", "verify", "inspect", "doctor", "gc", "repair", "cat"):
        result = CliRunner().invoke(app, [command, url])
        assert result.exit_code == 2, command
        assert "hunter2" not in result.output, (command, result.output)


@pytest.mark.parametrize(
    "endpoint",
    ["http://user:hunter2@h", "user:hunter2@h", "S3://h?sig=hunter2", "http://h#hunter2"],
)
def test_endpoint_that_is_refused_shows_no_secret(endpoint: str) -> None:
    with pytest.raises(OptionError) as caught:
        WriteOptions(endpoint=endpoint)
    assert "hunter2" not in f"{caught.value!r} {vars(caught.value)}"


@s3_alone
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "endpoint",
    [
        "http://user:p@hunter2@127.0.0.1:9",
        "http://user:p/hunter2@127.0.0.1:9",
        "http://user:hunter2@127.0.0.1:99999",
        "user:hunter2@127.0.0.1:9",
        "http://127.0.0.1:9?sig=hunter2",
        "http://us er:hunter2@127.0.0.1:9",
        "http://user:\thunter2@127.0.0.1:9",
        'http://user:"hunter2@127.0.0.1:9',
        "http://user:hunter2@127.0.0.1:9\n",
    ],
)
def test_password_in_the_endpoints_variable_is_in_no_text(
    object_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    call: str,
    endpoint: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with retries(0):
        with pytest.raises(StorageError) as caught:
            CALLS[call](object_prefix)
        output = CliRunner().invoke(app, ["doctor", object_prefix]).output
    shown = f"{caught.value!r} {vars(caught.value)} {output} {caplog.text} {capfd.readouterr()}"
    assert "hunter2" not in shown and "panicked" not in shown
    assert "failure" in output


@s3_alone
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"]
)
def test_variable_with_the_end_of_a_line_is_refused_by_its_name(
    object_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    call: str,
    name: str,
) -> None:
    """As one from a file that ends in one; obstore would panic, or sign wrongly."""
    monkeypatch.setenv(name, "hunter2\n")
    with pytest.raises(StorageError, match=f": {name} has a control character") as caught:
        CALLS[call](object_prefix)
    assert caught.value.errno == errno.EINVAL
    shown = f"{caught.value!r} {vars(caught.value)} {capfd.readouterr()}"
    assert "hunter2" not in shown and "panicked" not in shown


@s3_alone
def test_variable_that_obstore_does_not_read_may_have_several_lines(
    object_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_POLICY_OF_OURS", "{\n}\n")
    save(STATE, object_prefix)


@s3_alone
@pytest.mark.parametrize("call", CALLS)
def test_panic_of_obstore_is_an_error_of_the_store(
    object_prefix: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is no Exception, of a call as of an upload."""
    monkeypatch.setattr(object_services, "_is_printable", lambda _: True)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hunter2\r")  # which no header takes
    with pytest.raises(StorageError, match="obstore has panicked") as caught:
        CALLS[call](object_prefix)
    assert caught.value.errno == errno.EINVAL and "hunter2" not in str(caught.value)


@s3_alone
def test_endpoint_of_an_option_comes_before_all_variables(
    object_prefix: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(monkeypatch, object_server.environment("http://127.0.0.1:9"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with retries(0):
        save(STATE, object_prefix, endpoint=object_server.url)
    assert object_server.keys(object_prefix)
