"""Lists what lies beneath a prefix where obstore refuses to, or finds nothing; imported only there.

obstore drops a page of a listing for one key in it with an empty part, ".", ".." or a control
character (`aws s3 cp x s3://bucket/root//`). No name of ours is one. Such a page is asked for again
by a plain request, and these keys are passed over:

    s3  obstore signs URLs of objects alone. It takes the endpoint of a bucket as it is, with the
        query of a listing, so it signs that by whatever credentials it has.
    az  A signature for a listing is made of the account's key, or is there (SAS); or a token.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import hmac
import importlib
import logging
import os
import re
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException, IncompleteRead
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_plus, urlencode

from torch_dcpx.errors import StorageError
from torch_dcpx.storage.object_listing import ListedObject, Listing, tag_of
from torch_dcpx.storage.object_services import SERVICES, opened

if TYPE_CHECKING:
    from torch_dcpx.storage.object_store import Bucket

logger = logging.getLogger("torch_dcpx")

_VALID = timedelta(minutes=15)  # of a signature
_TIMEOUT_S = 30.0  # as obstore's
_AZURE_VERSION = "2023-11-03"
# Some stores write them as they are, which is no XML.
_NO_XML = re.compile(
    rb"(?i)[\0-\x08\x0b\x0c\x0e-\x1f]"
    rb"|&#(?:x0*(?:[0-8bcef]|1[0-9a-f])|0*(?:[0-8]|1[1245-9]|2[0-9]|3[01]));"
)


def listed(bucket: Bucket, prefix: str) -> Listing:
    """Returns what lies beneath a prefix, without keys that obstore takes for none.

    Raises: obstore's errors; StorageError: there are no credentials that this module knows.
    """
    try:
        return _listed(bucket, f"{prefix}/" if prefix else "")
    except ValueError as error:  # a size or a date that is none
        raise _generic(f"the answer is no listing: {error}") from None


def listed_anew(bucket: Bucket, prefix: str, empty: Listing | None) -> Listing:
    """Returns what lies beneath a prefix where obstore refuses it, or has found nothing (`empty`):
    it takes any XML for a listing, and a page of a proxy for an empty one. Where this module gets
    no answer, that stands.

    Raises: as `listed`; StorageError, EIO: the answer is no listing.
    """
    if empty is None:
        return listed(bucket, prefix)
    try:
        return listed(bucket, prefix)
    except StorageError as error:
        if error.errno == errno.EIO:
            raise
        logger.debug("an empty listing is believed: %s", error)
    except importlib.import_module("obstore.exceptions").BaseError as error:
        logger.debug("an empty listing of '%s' is believed: %s", bucket.url(prefix), type(error))
    return empty


def _listed(bucket: Bucket, begin: str) -> Listing:
    pages = _s3_pages if bucket.scheme == "s3" else _azure_pages
    objects: dict[str, ListedObject] = {}
    prefixes: list[str] = []
    for key, found in pages(bucket, begin):
        name = key[len(begin) :]
        if found is None and _is_name(name.removesuffix("/")):
            prefixes.append(name.removesuffix("/"))
        elif found is not None and _is_name(name):
            size, tag, modified = found
            tag = tag_of({"e_tag": tag}, bucket.url(key))
            objects[name] = ListedObject(int(size), tag, modified.timestamp())
    return Listing(objects, prefixes)


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(one < " " or one == "\x7f" for one in name)


# A key that ends in "/" and None; or an object's key, and its size, tag and date.
_Entry = tuple[str, "tuple[str, str, datetime] | None"]


def _s3_pages(bucket: Bucket, begin: str) -> Iterator[_Entry]:
    made_up = {"access_key_id": "x", "secret_access_key": "x"}  # of a URL that nobody uses
    named = _signed(bucket, bucket.endpoint, "x", made_up)
    place = named.partition("?")[0].removesuffix("/x")
    token: str | None = ""
    while token is not None:
        query = {"list-type": "2", "encoding-type": "url", "prefix": begin}
        if token:
            query["continuation-token"] = token
        # The "/" that comes behind an endpoint is the delimiter.
        endpoint = f"{place}?{urlencode(query, quote_via=quote)}&delimiter="
        if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on"):
            page = _page(bucket, f"{endpoint}/")
        else:
            more = {"virtual_hosted_style_request": True}  # takes the endpoint as the bucket's
            page = _page(bucket, _signed(bucket, endpoint, "", more))
        _check(bucket, begin, page, "ListBucketResult")
        is_encoded = page.findtext("{*}EncodingType") == "url"
        for one in page.iterfind("{*}CommonPrefixes"):
            yield _decoded(one.findtext("{*}Prefix"), is_encoded), None
        for one in page.iterfind("{*}Contents"):
            date = one.findtext("{*}LastModified", "").replace("Z", "+00:00")
            size, tag = one.findtext("{*}Size", ""), one.findtext("{*}ETag", "")
            found = size, tag, datetime.fromisoformat(date)
            yield _decoded(one.findtext("{*}Key"), is_encoded), found
        token = page.findtext("{*}NextContinuationToken") or None


def _signed(bucket: Bucket, endpoint: str | None, path: str, more: dict[str, Any]) -> str:
    obstore = importlib.import_module("obstore")
    store = opened(bucket.scheme, bucket.name, endpoint, {}, more)
    return str(obstore.sign(store, "GET", path, _VALID))


def _decoded(key: str | None, is_encoded: bool) -> str:
    return unquote_plus(key or "") if is_encoded else key or ""


def _azure_pages(bucket: Bucket, begin: str) -> Iterator[_Entry]:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    place = bucket.endpoint or _first(*SERVICES["az"].endpoints)
    place = (place or f"https://{account}.blob.core.windows.net").rstrip("/")
    marker: str | None = ""
    while marker is not None:
        query = {"restype": "container", "comp": "list", "prefix": begin, "delimiter": "/"}
        if marker:
            query["marker"] = marker
        signature, token = _azure_signature(bucket, account)
        target = f"{place}/{bucket.name}?{urlencode(query, quote_via=quote)}{signature}"
        page = _page(bucket, target, token)
        _check(bucket, begin, page, "EnumerationResults")
        for one in page.iterfind("Blobs/BlobPrefix"):
            yield one.findtext("Name", ""), None
        for one in page.iterfind("Blobs/Blob"):
            if one.findtext("Properties/ResourceType") != "directory":
                date = parsedate_to_datetime(one.findtext("Properties/Last-Modified", ""))
                size = one.findtext("Properties/Content-Length", "")
                found = size, one.findtext("Properties/Etag", ""), date
                yield one.findtext("Name", ""), found
        marker = page.findtext("NextMarker") or None


def _azure_signature(bucket: Bucket, account: str) -> tuple[str, str]:
    """Returns what a query has in it for a listing, and a token. Raises: StorageError."""
    given = _first("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN").lstrip("?")
    key = _first(
        "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"
    )
    token = os.environ.get("AZURE_STORAGE_TOKEN", "")
    if token:
        return "", token
    if given and not key:
        return f"&{given}", ""
    if not (key and account):
        raise StorageError(
            f"list '{bucket.url('')}': one key in it has an empty part, '.', '..' or a control "
            "character, which obstore does not list, nor does torch-dcpx without an account key or "
            "a SAS token: remove that object",
            errno=errno.EINVAL,
            path=bucket.url(""),
        )
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _VALID.total_seconds()))
    values = {"sp": "l", "ss": "b", "srt": "c", "st": "", "se": end, "sip": "", "spr": ""}
    text = "\n".join([account, *values.values(), _AZURE_VERSION, "", ""])
    digest = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
    signed = {"sv": _AZURE_VERSION, **values, "sig": base64.b64encode(digest).decode()}
    return f"&{urlencode({name: value for name, value in signed.items() if value})}", ""


def _first(*names: str) -> str:
    return next(filter(None, map(os.environ.get, names)), "")


def _page(bucket: Bucket, url: str, token: str = "") -> ET.Element:
    """Returns a page of a listing. Raises: obstore's GenericError, as if it had asked."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if bucket.scheme == "az":
        headers["x-ms-version"] = _AZURE_VERSION
    url = re.sub(r"://[^/?#]*@", "://", url)  # a user, whom urllib takes for a port
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - `opened` has looked
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            text = _NO_XML.sub(b"\x7f", answer.read())
        return ET.fromstring(text)  # noqa: S314 - expat bounds what entities become
    except urllib.error.HTTPError as error:
        words = _words(error).decode(errors="replace")
        raise _generic(f"status code: {error.code} {error.reason}: {words}") from None
    except (OSError, HTTPException, ET.ParseError) as error:
        raise _generic(f"the listing had no answer, or none that is one: {error}") from None


def _words(error: urllib.error.HTTPError) -> bytes:
    """Returns what a refusal says, as far as it comes."""
    try:
        return error.read()
    except IncompleteRead as cut:
        return cut.partial
    except (OSError, HTTPException):
        return b""


def _check(bucket: Bucket, begin: str, page: ET.Element, wanted: str) -> None:
    """Raises StorageError, EIO: an answer is no listing, as the page of a proxy with status 200."""
    found = page.tag.rpartition("}")[2]
    if found != wanted:
        url = bucket.url(begin)
        text = f"list '{url}': the answer is no listing: <{found:.40}> in place of <{wanted}>"
        raise StorageError(text, errno=errno.EIO, path=url)


def _generic(text: str) -> Exception:
    """Returns an error of obstore's, for `Bucket.errors`."""
    error: Exception = importlib.import_module("obstore.exceptions").GenericError(text)
    return error
