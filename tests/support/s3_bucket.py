"""What the S3 server of tests stores and answers, without a socket: bodies, objects, lists.

Bodies are views of 1 MiB blocks of touched memory. A dropped body is views of one shared block, as
many as its length asks for: it was received into that block, and is served from it.
"""

from __future__ import annotations

import collections
import itertools
import mmap
import re
import threading
import time
import urllib.parse
from bisect import bisect_right
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import NamedTuple
from xml.sax.saxutils import escape, unescape

BLOCK_BYTES = 1 << 20
GROWTH_BYTES = 16 << 20
LEAST_PART_BYTES = 5 << 20


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """An answer with an S3 error code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


# ---- Memory -------------------------------------------------------------------------------------


class Blocks:
    """Equal blocks of touched memory; those of a body that is gone serve the next. Thread-safe."""

    def __init__(self, touched_bytes: int) -> None:
        self._free: collections.deque[memoryview] = collections.deque()
        self._lock = threading.Lock()
        self.nbytes = 0
        self.shared = self._allocate(BLOCK_BYTES)[0]
        if touched_bytes:
            self._free.extend(self._allocate(touched_bytes))

    def take(self) -> memoryview:
        with self._lock:
            if not self._free:
                self._free.extend(self._allocate(GROWTH_BYTES))
            return self._free.pop()

    def give_back(self, blocks: Sequence[memoryview]) -> None:
        self._free.extend(blocks)

    def _allocate(self, nbytes: int) -> list[memoryview]:
        self.nbytes += nbytes
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1
        view = memoryview(memory)
        return [view[at : at + BLOCK_BYTES] for at in range(0, nbytes, BLOCK_BYTES)]


class Body:
    """Bytes in memory that may be in pieces. Gives its blocks back when nobody refers to it."""

    def __init__(
        self, views: list[memoryview], blocks: Blocks | None = None, keeps: Sequence[Body] = ()
    ) -> None:
        self.views, self._blocks, self._keeps = views, blocks, keeps
        self._ends = list(itertools.accumulate(len(view) for view in views))
        self.nbytes = self._ends[-1] if views else 0

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Returns the views of a range of the bytes."""
        found = []
        index = bisect_right(self._ends, start)
        while start < stop:
            view, end = self.views[index], self._ends[index]
            begin = end - len(view)
            found.append(view[start - begin : min(stop, end) - begin])
            start, index = end, index + 1
        return found

    def __bytes__(self) -> bytes:
        return b"".join(self.views)

    def __del__(self) -> None:
        if self._blocks is not None:
            self._blocks.give_back([v for v in self.views if len(v) == BLOCK_BYTES])


# ---- Objects ------------------------------------------------------------------------------------


class Stored(NamedTuple):
    body: Body
    etag: str
    seconds: float  # since the epoch

    def headers(self) -> dict[str, str]:
        return {"ETag": self.etag, "Last-Modified": formatdate(self.seconds, usegmt=True)}


class Request(NamedTuple):
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Body


class Answer(NamedTuple):
    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012 - never written to
    views: Sequence[memoryview] = ()
    nbytes: int | None = None  # None: of the views
    body: Body | None = None  # whose views they are: it must not give its blocks back before

    @classmethod
    def xml(cls, name: str, text: str, status: int = 200) -> Answer:
        data = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{text}</{name}>'.encode()
        return cls(status, {"Content-Type": "application/xml"}, [memoryview(data)])


def range_of(text: str, nbytes: int) -> tuple[int, int]:
    """Returns the start and the end of a Range header's bytes."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    if not first:
        start, stop = max(0, nbytes - int(last)), nbytes
    else:
        start, stop = int(first), min(int(last) + 1 if last else nbytes, nbytes)
    if start >= stop:
        raise Refusal(416, "InvalidRange")
    return start, stop


def kind_of(method: str, key: str, query: dict[str, str], headers: dict[str, str]) -> str:
    """Returns the name that S3 has for a request."""
    if not key:
        if method == "GET":
            kinds = {"location": "GetBucketLocation", "uploads": "ListMultipartUploads"}
            return next((kinds[name] for name in kinds if name in query), "ListObjectsV2")
        names = {"PUT": "CreateBucket", "HEAD": "HeadBucket", "POST": "DeleteObjects"}
        return names.get(method, "DeleteBucket")
    if method == "POST":
        return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
    if "uploadId" in query:
        return {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload"}.get(method, "ListParts")
    if "x-amz-copy-source" in headers:
        return "CopyObject"
    return f"{method.title()}Object"


class Upload(NamedTuple):
    name: str  # bucket/key
    parts: dict[int, Stored]  # by number


class Bucket:
    """All objects and unfinished uploads. Thread-safe; a method for each kind of request."""

    def __init__(self, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._made: set[str] = set()  # buckets
        self.objects: dict[str, Stored] = {}  # bucket/key
        self.uploads: dict[str, Upload] = {}  # by id

    def answer(self, kind: str, request: Request) -> Answer:
        method: Callable[[Request], Answer] | None = getattr(self, kind, None)
        if method is None:
            raise Refusal(501, "NotImplemented")
        if kind == "CreateBucket":
            self._made.add(request.bucket)
        elif self.is_strict and request.bucket not in self._made:
            raise Refusal(404, "NoSuchBucket")
        return method(request)

    def _new(self, body: Body) -> Stored:
        return Stored(body, f'"{next(self._numbers):032x}"', time.time())

    def _put(self, request: Request, body: Body) -> Stored:
        """Stores an object if the request's conditions hold."""
        name, wanted = f"{request.bucket}/{request.key}", request.headers.get("if-match")
        with self._lock:
            old = self.objects.get(name)
            if self.is_strict and request.headers.get("if-none-match", "*") != "*":
                raise Refusal(501, "NotImplemented")
            if old is not None and "if-none-match" in request.headers:
                raise Refusal(412, "PreconditionFailed")
            if wanted is not None and old is None:
                raise Refusal(404, "NoSuchKey")
            if wanted is not None and old is not None and wanted not in ("*", old.etag):
                raise Refusal(412, "PreconditionFailed")
            new = self.objects[name] = self._new(body)
        return new

    def _parts(self, request: Request) -> dict[int, Stored]:
        found = self.uploads.get(request.query["uploadId"])
        if found is None or found.name != f"{request.bucket}/{request.key}":
            raise Refusal(404, "NoSuchUpload")
        return found.parts

    def _object(self, name: str) -> Stored:
        try:
            return self.objects[name]
        except KeyError:
            raise Refusal(404, "NoSuchKey") from None

    def PutObject(self, request: Request) -> Answer:
        return Answer(200, {"ETag": self._put(request, request.body).etag})

    def CopyObject(self, request: Request) -> Answer:
        source = urllib.parse.unquote(request.headers["x-amz-copy-source"]).lstrip("/")
        new = self._put(request, self._object(source).body)
        text = f"<ETag>{new.etag}</ETag><LastModified>{iso(new.seconds)}</LastModified>"
        return Answer.xml("CopyObjectResult", text)

    def CreateMultipartUpload(self, request: Request) -> Answer:
        upload = f"upload-{next(self._numbers)}"
        self.uploads[upload] = Upload(f"{request.bucket}/{request.key}", {})
        where = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        return Answer.xml("InitiateMultipartUploadResult", f"{where}<UploadId>{upload}</UploadId>")

    def UploadPart(self, request: Request) -> Answer:
        part = self._new(request.body)
        self._parts(request)[int(request.query["partNumber"])] = part
        return Answer(200, {"ETag": part.etag})

    def CompleteMultipartUpload(self, request: Request) -> Answer:
        parts, chosen, last = self._parts(request), [], 0
        for text in re.findall(r"<Part>(.*?)</Part>", bytes(request.body).decode(), re.DOTALL):
            number, etag = element(text, "PartNumber"), element(text, "ETag")
            part = parts.get(int(number))
            if part is None or part.etag.strip('"') != etag.strip('"'):
                raise Refusal(400, "InvalidPart")
            if int(number) <= last:
                raise Refusal(400, "InvalidPartOrder")
            last = int(number)
            chosen.append(part.body)
        least = LEAST_PART_BYTES if self.is_strict else 0
        if not chosen:
            raise Refusal(400, "MalformedXML")
        if any(body.nbytes < least for body in chosen[:-1]):
            raise Refusal(400, "EntityTooSmall")
        body = Body([view for part in chosen for view in part.views], keeps=chosen)
        new = self._put(request, body)
        self.uploads.pop(request.query["uploadId"], None)
        where = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
        return Answer.xml("CompleteMultipartUploadResult", f"{where}<ETag>{new.etag}</ETag>")

    def AbortMultipartUpload(self, request: Request) -> Answer:
        self._parts(request)
        self.uploads.pop(request.query["uploadId"], None)
        return Answer(204)

    def GetObject(self, request: Request) -> Answer:
        found = self._object(f"{request.bucket}/{request.key}")
        headers, nbytes = found.headers(), found.body.nbytes
        if request.headers.get("if-match", found.etag) not in ("*", found.etag):
            raise Refusal(412, "PreconditionFailed")
        if request.headers.get("if-none-match") in ("*", found.etag):
            return Answer(304, headers)
        if "range" not in request.headers:
            return Answer(200, headers, found.body.cut(0, nbytes), None, found.body)
        start, stop = range_of(request.headers["range"], nbytes)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{nbytes}"
        return Answer(206, headers, found.body.cut(start, stop), None, found.body)

    def HeadObject(self, request: Request) -> Answer:
        answer = self.GetObject(request)
        return answer._replace(views=(), nbytes=sum(map(len, answer.views)))

    def DeleteObject(self, request: Request) -> Answer:
        self.objects.pop(f"{request.bucket}/{request.key}", None)
        return Answer(200)  # the CRT of s3torchconnector takes no 204 without a length

    def DeleteObjects(self, request: Request) -> Answer:
        text = bytes(request.body).decode()
        keys = re.findall(r"<Key>(.*?)</Key>", text, re.DOTALL)
        for key in keys:
            self.objects.pop(f"{request.bucket}/{unescape(key, QUOTES)}", None)
        is_quiet = "<Quiet>true</Quiet>" in text
        gone = [f"<Deleted><Key>{key}</Key></Deleted>" for key in keys if not is_quiet]
        return Answer.xml("DeleteResult", "".join(gone))

    def ListObjectsV2(self, request: Request) -> Answer:
        query, bucket = request.query, f"{request.bucket}/"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("start-after", "")
        token = bytes.fromhex(query.get("continuation-token", "")).decode()
        limit = min(int(query.get("max-keys", 1000)), 1000)
        names: dict[str, Stored | None] = {}  # None: a common prefix
        with self._lock:
            everything = sorted(self.objects.items())
        for full, stored in everything:
            name = key = full.removeprefix(bucket)
            if key == full or not key.startswith(prefix) or key <= after:
                continue
            place = key.find(delimiter, len(prefix)) if delimiter else -1
            if place >= 0:
                name = key[: place + len(delimiter)]
            if name > token:
                names[name] = stored if place < 0 else None
            if len(names) > limit:
                break
        is_truncated = len(names) > limit
        if is_truncated:
            names.popitem()
        is_quoted = query.get("encoding-type") == "url"
        written = urllib.parse.quote if is_quoted else escape
        text = f"<Name>{request.bucket}</Name><Prefix>{written(prefix)}</Prefix>"
        text += "<EncodingType>url</EncodingType>" if is_quoted else ""
        text += f"<KeyCount>{len(names)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        text += f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>"
        if is_truncated:
            token = list(names)[-1].encode().hex()
            text += f"<NextContinuationToken>{token}</NextContinuationToken>"
        for name, found in names.items():
            if found is None:
                text += f"<CommonPrefixes><Prefix>{written(name)}</Prefix></CommonPrefixes>"
            else:
                text += (
                    f"<Contents><Key>{written(name)}</Key><ETag>{found.etag}</ETag><LastModified>"
                    f"{iso(found.seconds)}</LastModified><Size>{found.body.nbytes}</Size></Contents>"
                )
        return Answer.xml("ListBucketResult", text)

    def ListMultipartUploads(self, request: Request) -> Answer:
        """Lists all of a prefix in one page."""
        prefix = f"{request.bucket}/{request.query.get('prefix', '')}"
        text = f"<Bucket>{request.bucket}</Bucket><IsTruncated>false</IsTruncated>"
        for upload, (name, _) in sorted(self.uploads.items()):
            if name.startswith(prefix):
                key = escape(name.partition("/")[2])
                text += f"<Upload><Key>{key}</Key><UploadId>{upload}</UploadId></Upload>"
        return Answer.xml("ListMultipartUploadsResult", text)

    def GetBucketLocation(self, request: Request) -> Answer:
        return Answer.xml("LocationConstraint", "")

    def HeadBucket(self, request: Request) -> Answer:
        return Answer()

    CreateBucket = DeleteBucket = HeadBucket


QUOTES = {"&quot;": '"', "&apos;": "'"}


def element(text: str, name: str) -> str:
    found = re.search(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    if found is None:
        raise Refusal(400, "MalformedXML")
    return unescape(found[1].strip(), QUOTES)


def iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
