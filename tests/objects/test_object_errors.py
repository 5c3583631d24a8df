"""What a store says reaches the user: its own code first, then the URL once, and no secret."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from object_outcomes import LARGE_NUMEL, Store, bucket_of, retries, save, state_of
from support.object_fixture import s3_alone
from support.object_proxy import FaultProxy
from support.small_managers import manager_of

import torch_dcpx as dcpx
from torch_dcpx import StorageError
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

# ---- Words of obstore ---------------------------------------------------------------------------

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
_GONE = f"Object at location p/a not found: {_GET}404 Not Found: "
_S3 = f"Generic S3 error: {_GET}"
# (exception, its text) -> errno, code, text
_TOLD: dict[tuple[str, str], tuple[int, str, str]] = {
    (  # as RGW
        "GenericError",
        f"Generic S3 error: Error performing list request: {_GET}403 Forbidden: "
        + _XML.format("InvalidAccessKeyId", ""),
    ): (errno.EACCES, "InvalidAccessKeyId", "403 Forbidden"),
    (
        "PermissionDeniedError",
        f"The operation lacked the necessary privileges for path p/a: {_GET}403 Forbidden: "
        + _XML.format("RequestTimeTooSkewed", "The difference is &lt;too&gt; large."),
    ): (errno.EACCES, "RequestTimeTooSkewed", "The difference is <too> large."),
    ("GenericError", f"{_S3}400 Bad Request: {_XML.format('ExpiredToken', 'Expired.')}"): (
        errno.EACCES,
        "ExpiredToken",
        "Expired.",
    ),
    ("GenericError", f"{_S3}400 Bad Request: {_XML.format('RequestTimeout', 'Slow.')}"): (
        errno.EIO,
        "RequestTimeout",
        "Slow.",
    ),
    ("FileNotFoundError", _GONE + _XML.format("NoSuchBucket", "")): (
        errno.ENXIO,
        "NoSuchBucket",
        "there is no such bucket",
    ),
    ("FileNotFoundError", _GONE + _XML.format("NoSuchKey", "The key does not exist.")): (
        errno.ENOENT,
        "",
        "No such file or directory",
    ),
    ("FileNotFoundError", _GONE + _XML.format("NoSuchUpload", "The upload does not exist.")): (
        errno.ENOENT,
        "NoSuchUpload",
        "The upload does not exist.",
    ),
    (
        "GenericError",
        f"Generic MicrosoftAzure error: {_GET}403 Forbidden: <Error>\n  "
        "<Code>AuthorizationFailure</Code>\n  <Message>Not so.\nRequestId:1\nTime:2</Message>",
    ): (errno.EACCES, "AuthorizationFailure", "Not so."),
    ("GenericError", f"{_S3}503 Service Unavailable: go to http://a:hunter2@b/c?d"): (
        errno.EIO,
        "",
        "503 Service Unavailable: go to http://b",
    ),
    ("GenericError", "Generic S3 error: " + _SENT.format("PUT")): (
        errno.EIO,
        "",
        "no answer from http://127.0.0.1:9: Connection refused (3 retries)",
    ),
    ("GenericError", "Generic S3 error: " + _SENT.format("DELETE")): (
        errno.EIO,
        "",
        "the upload ended early, its parts stay until a rule of the bucket removes them: no answer "
        "from http://127.0.0.1:9: Connection refused (3 retries)",
    ),
    (
        "GenericError",
        "Generic S3 error: Error performing GET http://h/b in 9.6µs - Received redirect "
        "without LOCATION, this normally indicates an incorrectly configured region",
    ): (errno.EINVAL, "", "the bucket lies in another region: set AWS_REGION"),
}


def test_error_of_obstore_is_told_by_its_code() -> None:
    exceptions: Any = importlib.import_module("obstore.exceptions")
    for (kind, text), expected in _TOLD.items():
        error = getattr(exceptions, kind, FileNotFoundError)(text)
        assert tuple(said(error, SERVICES["s3"])) == expected, text


def test_errors_of_the_store_have_no_secrets(store: Store) -> None:
    exceptions: Any = importlib.import_module("obstore.exceptions")
    text = (
        "Server returned 403: <AWSAccessKeyId>AKIAWHATEVER</AWSAccessKeyId> "
        "https://me:hunter2@h/b?X-Amz-Credential=AKIAWHATEVER%2Fx&X-Amz-Signature=deadbeef"
        "&partNumber=1 "
        'aws_secret_access_key: "hunter2" x-amz-security-token: FwoToken\n\nDebug source: hunter3'
    )
    if store.server.scheme == "az":
        text = (
            "https://me:hunter2@a.blob.core.windows.net/c/b?sv=2023&sig=AKIAWHATEVER&partNumber=1 "
            "The MAC signature found in the HTTP request 'deadbeef=' is not the same: "
            "Authorization: SharedKey tests:FwoToken, account_key=hunter2 bearer FwoToken"
        )
    with pytest.raises(StorageError) as caught, bucket_of(store.url)[0].errors("get", "k"):
        raise exceptions.GenericError(text)
    for secret in ("AKIAWHATEVER", "deadbeef", "hunter2", "hunter3", "FwoToken"):
        assert secret not in str(caught.value) + repr(caught.value.__cause__)
    assert caught.value.__cause__ is None and "partNumber=1" in str(caught.value)


# ---- Answers of a store -------------------------------------------------------------------------


@s3_alone
def test_upload_that_a_dying_gateway_ends_is_told_as_that(store: Store, proxy: FaultProxy) -> None:
    proxy.fail("upload_part", "reset", times=None)
    proxy.fail("abort_upload", "reset", times=None)
    with retries(1), pytest.raises(StorageError) as caught:
        save(state_of(1, LARGE_NUMEL), store.url)
    text = str(caught.value)
    assert "no answer from http://127.0.0.1" in text and "(1 retry)" in text
    assert "DELETE" not in text and "uploadId" not in text and text.count("s3://") == 1


@pytest.mark.parametrize("call", CALLS)
def test_bucket_that_is_not_there_is_named(store: Store, call: str) -> None:
    code = {"s3": "NoSuchBucket", "az": "ContainerNotFound"}[store.server.scheme]
    url = f"{store.server.scheme}://nothere/run"
    with retries(0), pytest.raises(StorageError, match=f"^{code}: .*there is no such") as caught:
        CALLS[call](url)
    assert caught.value.errno == errno.ENXIO and str(caught.value).count("://") == 1
    result = CliRunner().invoke(app, ["doctor", url])
    assert result.exit_code == 2 and f"{code}: list '{url}'" in result.output


@pytest.mark.parametrize("call", CALLS)
def test_refusal_is_told_by_the_stores_code_and_our_url_once(
    store: Store, proxy: FaultProxy, call: str
) -> None:
    """Also of a HEAD, whose answer has no words."""
    proxy.fail("any", "403", times=None)
    with retries(0), pytest.raises(StorageError, match=r"^AccessDenied: ") as caught:
        CALLS[call](store.url)
    text = str(caught.value)
    assert caught.value.errno == errno.EACCES
    assert text.count("://") == 1 and text.endswith("': Access Denied"), text
    assert "http" not in text and store.url in text


@s3_alone
@pytest.mark.parametrize(
    ("fault", "code", "number"),
    [("400", "ExpiredToken", errno.EACCES), ("503", "SlowDown", errno.EIO)],
)
def test_code_of_the_store_is_told_where_head_is_asked(
    store: Store, proxy: FaultProxy, fault: str, code: str, number: int
) -> None:
    """Its answer has a status alone: GET is asked once. Nor does HEAD, which is asked whether an
    object is empty, hide the code of the GET of its end.
    """
    save(STATE, store.url)
    for kind in ("get_object", "head_object"):
        proxy.fail(kind, fault, times=None, key="/__0_")
    with retries(0), pytest.raises(StorageError, match=f"^{code}: get 's3:"):
        CALLS["load"](store.url)
    proxy.heal()
    proxy.clear()
    proxy.fail("any", fault, times=None)
    with retries(0), pytest.raises(StorageError, match=f"^{code}: get 's3:") as caught:
        CALLS["save at once"](store.url)
    assert caught.value.errno == number
    kinds = [one.kind for one in proxy.requests()]
    assert kinds[:2] == ["head_object", "get_object"] and kinds.count("get_object") == 1


# ---- Variables ----------------------------------------------------------------------------------


@s3_alone
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("has_id", [False, True])
def test_missing_credentials_are_told(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str, *, has_id: bool
) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    if not has_id:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # of roles
    with retries(0), pytest.raises(StorageError) as caught:
        CALLS[call](store.url)
    text = str(caught.value)
    assert "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in text, text
    assert "~/.aws is not read" in text and "aws configure export-credentials" in text
    assert caught.value.errno == errno.EACCES


_ENDPOINTS = (
    "http://user:p@hunter2@127.0.0.1:9",
    "http://user:p/hunter2@127.0.0.1:9",
    "http://user:hunter2@127.0.0.1:99999",
    "user:hunter2@127.0.0.1:9",
    "http://127.0.0.1:9?sig=hunter2",
    "http://us er:hunter2@127.0.0.1:9",
    "http://user:\thunter2@127.0.0.1:9",
    'http://user:"hunter2@127.0.0.1:9',
    "http://user:hunter2@127.0.0.1:9\n",
)


@s3_alone
@pytest.mark.parametrize("call", CALLS)
def test_password_in_the_endpoints_variable_is_in_no_text(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    call: str,
) -> None:
    for endpoint in _ENDPOINTS:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with retries(0):
            with pytest.raises(StorageError) as caught:
                CALLS[call](store.url)
            output = CliRunner().invoke(app, ["doctor", store.url]).output
        shown = f"{caught.value!r} {vars(caught.value)} {output} {caplog.text} {capfd.readouterr()}"
        assert "hunter2" not in shown and "panicked" not in shown, endpoint
        assert "failure" in output, endpoint


@s3_alone
@pytest.mark.parametrize("call", CALLS)
def test_variable_with_the_end_of_a_line_is_refused_by_its_name(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    call: str,
) -> None:
    """As one from a file that ends in one; obstore would panic, or sign wrongly."""
    for name in (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION",
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(name, "hunter2\n")
            with pytest.raises(StorageError, match=f": {name} has a control character") as caught:
                CALLS[call](store.url)
        assert caught.value.errno == errno.EINVAL
        shown = f"{caught.value!r} {vars(caught.value)} {capfd.readouterr()}"
        assert "hunter2" not in shown and "panicked" not in shown
    monkeypatch.setenv("AWS_POLICY_OF_OURS", "{\n}\n")  # which obstore does not read
    save(STATE, store.url)


@s3_alone
@pytest.mark.parametrize("call", CALLS)
def test_panic_of_obstore_is_an_error_of_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It is no Exception, of a call as of an upload."""
    monkeypatch.setattr(object_services, "_is_printable", lambda _: True)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hunter2\r")  # which no header takes
    with pytest.raises(StorageError, match="obstore has panicked") as caught:
        CALLS[call](store.url)
    assert caught.value.errno == errno.EINVAL and "hunter2" not in str(caught.value)
