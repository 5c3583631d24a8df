"""An S3 server on this machine for tests: a process of its own, one bucket, helper calls.

The helper calls use no client of S3 but plain HTTP: they share no thread, no connection and no
mistake with what is tested, and pass by every proxy.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import subprocess
import tempfile
import threading
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from support import s3_server
from support.machine import seconds

BUCKET = "checkpoints"


class Upload(NamedTuple):
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload_id: str


class ObjectServer:
    """A running server with an empty bucket. Thread-safe.

    Every call that takes a key or a prefix takes `s3://bucket/key` as well. A prefix is a string
    that keys start with, not a folder: "run/1" finds "run/10".
    """

    scheme: ClassVar[str] = "s3"
    keeps_connections: ClassVar[bool] = True  # also idle ones
    has_aborts: ClassVar[bool] = True  # an upload that failed can be ended
    looks: ClassVar[int] = 1  # requests for the end of an object
    begins_upload: ClassVar[str] = "create_upload"  # the first request of an upload by parts

    def __init__(self, bucket: str = BUCKET, options: Sequence[str] = ("--strict",)) -> None:
        """Starts the process with these options, waits until it answers, creates the bucket."""
        self._options = options
        self.bucket, self._deadline_s = bucket, seconds(120)  # of its start, and of an answer
        self._guard, self.host, self.port = threading.Lock(), "127.0.0.1", 0
        self._client = http.client.HTTPConnection(self.host, timeout=self._deadline_s)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # close() does
        self._process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=s3_server.TESTS,
            env={**os.environ, **self._variables()},
        )
        try:
            self.port = self._client.port = self._read_port()
            self._ask("PUT", "")
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def root(self) -> str:
        """The URL of the bucket."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def environment(self, url: str = "") -> dict[str, str]:
        """Returns the variables of a process that uses the store, by obstore or by boto, or the
        proxy at `url`.
        """
        return {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url or self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def keys(self, prefix: str = "") -> list[str]:
        """Returns the keys that start with `prefix`, sorted."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns key -> bytes of the objects whose keys start with `prefix`."""
        query = {"list-type": "2", "prefix": self._key(prefix), "encoding-type": "url"}
        found = {}
        while True:
            page = ET.fromstring(self._ask("GET", "", query))
            for entry in page.iterfind("{*}Contents"):
                key = urllib.parse.unquote_plus(entry.findtext("{*}Key", ""))
                found[key] = int(entry.findtext("{*}Size", ""))
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                return found
            query["continuation-token"] = token

    def get(self, key: str) -> bytes:
        """Returns the object. Raises KeyError: there is none."""
        return self._ask("GET", self._key(key))

    def put(self, key: str, data: bytes) -> None:
        """Writes the object, over one that is there."""
        self._ask("PUT", self._key(key), body=data)

    def delete(self, key: str) -> None:
        """Deletes the object, if there is one."""
        self._ask("DELETE", self._key(key))

    def uploads(self, prefix: str = "") -> list[Upload]:
        """Returns the unfinished uploads of keys that start with `prefix`."""
        query = {"uploads": "", "prefix": self._key(prefix)}
        page = ET.fromstring(self._ask("GET", "", query))
        return sorted(
            Upload(entry.findtext("{*}Key", ""), entry.findtext("{*}UploadId", ""))
            for entry in page.iterfind("{*}Upload")
        )

    def remove(self, prefix: str) -> None:
        """Deletes the objects and aborts the uploads of keys that start with `prefix`."""
        for key in self.keys(prefix):
            self.delete(key)
        for upload in self.uploads(prefix):
            self._ask("DELETE", upload.key, {"uploadId": upload.upload_id})

    def kill(self) -> None:
        """Ends the process as a crash does; what it stored is lost."""
        self._process.kill()
        self._process.wait(self._deadline_s)

    def close(self) -> None:
        self.kill()
        self._client.close()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()

    def _command(self) -> list[str]:
        return [*s3_server.COMMAND, *self._options, "--until-eof"]

    def _variables(self) -> dict[str, str]:
        return {}

    def headers(self) -> dict[str, str]:
        """Returns those of a helper call."""
        return {}

    def target(self, key: str, query: dict[str, str] | None = None) -> str:
        """Returns the path and query of a helper call."""
        target = urllib.parse.quote(f"/{self.bucket}/{key}" if key else f"/{self.bucket}")
        return f"{target}?{urllib.parse.urlencode(query)}" if query else target

    def _read_port(self) -> int:
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], self._deadline_s)[0]:
            for line in self._process.stdout:
                if found := re.fullmatch(rb"(?:.*http:.*:)?(\d+)\n", line):
                    return int(found[1])
        self._errors.seek(0)
        raise RuntimeError(f"no server within {self._deadline_s:.0f} s:\n{self._errors.read()}")

    def _key(self, key: str) -> str:
        return key.removeprefix(self.root).removeprefix("/")

    def _ask(
        self, method: str, key: str, query: dict[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        return self.ask(method, self.target(key, query), body)

    def ask(self, method: str, target: str, body: bytes = b"") -> bytes:
        """Sends a request; returns the answer's body. Raises KeyError: there is no such object."""
        headers = {"Content-Length": str(len(body)), **self.headers()}
        with self._guard:
            is_whole = False
            try:
                self._client.request(method, target, body or None, headers)
                answer = self._client.getresponse()
                data = answer.read()
                is_whole = True
            finally:
                if not (is_whole and self.keeps_connections):
                    self._client.close()
        if answer.status == 404:
            raise KeyError(target)
        if answer.status >= 300:
            raise RuntimeError(f"{method} {target}: {answer.status} {data!r}")
        return data
