"""The requests of S3's and Azure's HTTP APIs, by kind, and refusals: what a proxy understands."""

from __future__ import annotations

import urllib.parse
from http.client import HTTPMessage
from typing import NamedTuple

# (method, a parameter of the query that tells it) -> kind of a request for an object
_OF_KEYS = {
    ("PUT", "partNumber"): "upload_part",
    ("PUT", ""): "put_object",
    ("POST", "uploads"): "create_upload",
    ("POST", "uploadId"): "complete_upload",
    ("DELETE", "uploadId"): "abort_upload",
    ("DELETE", ""): "delete",
    ("GET", "uploadId"): "list_parts",
    ("GET", ""): "get_object",
    ("HEAD", ""): "head_object",
}
_OF_BUCKETS = {
    ("POST", "delete"): "delete_many",
    ("GET", "uploads"): "list_uploads",
    ("GET", ""): "list",
    ("HEAD", ""): "head_bucket",
}
# of Azure: method, the query's "comp" -> kind
_OF_BLOBS = {
    ("PUT", "block"): "upload_part",
    ("PUT", "blocklist"): "complete_upload",
    ("PUT", ""): "put_object",
    ("DELETE", ""): "delete",
    ("GET", ""): "get_object",
    ("HEAD", ""): "head_object",
}
_OF_CONTAINERS = {("POST", "batch"): "delete_many", ("GET", "list"): "list"}
KINDS = frozenset([*_OF_KEYS.values(), *_OF_BUCKETS.values(), "copy_object", "other"])

# fault -> status, code of S3, text
REFUSALS = {
    "200": (200, "InternalError", "We encountered an internal error. Please try again."),
    "400": (400, "ExpiredToken", "The provided token has expired."),
    "403": (403, "AccessDenied", "Access Denied"),
    "409": (409, "ConditionalRequestConflict", "A conflicting operation occurred."),
    "412": (412, "PreconditionFailed", "At least one of the preconditions did not hold."),
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "501": (501, "NotImplemented", "This request is not implemented."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
}


class Request(NamedTuple):
    """One request, and what became of it."""

    number: int  # from 0
    kind: str  # of KINDS
    key: str  # of a listing, the prefix; of delete_many, ""
    part: int = 0  # of upload_part, from 1
    range: str = ""  # the header; "": none
    if_match: str = ""
    if_none_match: str = ""
    sent_bytes: int = 0  # of the body, by the client
    received_bytes: int = 0  # of the answer's body, sent off to the client
    status: int = 0  # the server's or the fault's; 0: none yet, or the server never heard of it
    fault: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the server has done it, as far as is known."""
        return self.status // 100 == 2


def read_request(method: str, target: str, headers: HTTPMessage) -> Request:
    """Returns the request of an HTTP head, path style; its number is 0."""
    path, _, text = target.partition("?")
    query = dict(urllib.parse.parse_qsl(text, keep_blank_values=True))
    _, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
    if headers.get("x-ms-version"):
        _, _, key = key.partition("/")  # the account comes first
        comp = query.get("comp", "")
        kind = (_OF_BLOBS if key else _OF_CONTAINERS).get((method, comp), "other")
    else:
        kind = _kind_at_s3(method, query, key)
    if kind == "put_object" and headers.get("x-amz-copy-source"):
        kind = "copy_object"
    return Request(
        0,
        kind,
        key or query.get("prefix", ""),
        int(query.get("partNumber", "0")),
        headers.get("Range", ""),
        headers.get("If-Match", ""),
        headers.get("If-None-Match", ""),
    )


def _kind_at_s3(method: str, query: dict[str, str], key: str) -> str:
    kinds = _OF_KEYS if key else _OF_BUCKETS
    names = [name for name in (*query, "") if (method, name) in kinds]
    return kinds[method, names[0]] if names else "other"


def with_one_key(target: str) -> str:
    """Returns the target of a listing with pages of one key; Azure refuses it if a header, not the
    query, has the signature.
    """
    path, _, text = target.partition("?")
    name = "maxresults" if "comp=list" in text else "max-keys"
    kept = [one for one in text.split("&") if one and not one.startswith(f"{name}=")]
    return f"{path}?{'&'.join([*kept, f'{name}=1'])}"


def refusal(fault: str) -> tuple[int, bytes]:
    """Returns status and body of S3's answer for a fault of REFUSALS."""
    status, code, text = REFUSALS[fault]
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{text}</Message>"
        "<RequestId>TESTS</RequestId><HostId>TESTS</HostId></Error>"
    )
    return status, body.encode()
