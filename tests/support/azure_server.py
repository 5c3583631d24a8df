"""A server of Azure's blobs on this machine for tests: Azurite, one container, helper calls.

`make azurite` installs it (node and npm are needed). It keeps everything in memory, and does a
conditional PUT in one step: of several at a time one wins, as Azure has it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
import urllib.parse
import xml.etree.ElementTree as ET
from typing import ClassVar

from support.object_fixture import AZURITE
from support.object_server import BUCKET, ObjectServer, Upload

ACCOUNT, KEY = "tests", base64.b64encode(b"tests").decode()
_VERSION = "2023-11-03"
_VALID_S = 30 * 86400
# It ends with the tests, also where they were killed, and removes deleted data while it runs: by
# default after 10 to 20 minutes, when they have filled the memory.
_MAIN = """
const constants = (file) => require(process.argv[1] + "/dist/src/" + file + "/utils/constants");
constants("blob").DEFAULT_GC_INTERVAL_MS = 5000;
constants("common").DEFAULT_EXTENT_GC_PROTECT_TIME_IN_MS = 60000;
process.stdin.on("end", () => process.exit()).resume();
require(process.argv[1] + "/dist/src/blob/main.js");
"""


class AzureServer(ObjectServer):
    """As `ObjectServer`, for `az://container/key`."""

    scheme: ClassVar[str] = "az"
    keeps_connections: ClassVar[bool] = False
    has_aborts: ClassVar[bool] = False  # Azure removes what was not committed after a week
    looks: ClassVar[int] = 2
    begins_upload: ClassVar[str] = "upload_part"

    def __init__(self, bucket: str = BUCKET) -> None:
        self._signature = _account_signature()
        super().__init__(bucket)

    @property
    def url(self) -> str:
        return f"{super().url}/{ACCOUNT}"

    def environment(self, url: str = "") -> dict[str, str]:
        """Returns the variables of a process that uses the store, or the proxy at `url`."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}" if url else self.url,
            "AZURE_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Returns key -> bytes of the objects whose keys start with `prefix`."""
        found = self._list(prefix, "")
        return {key: int(entry.findtext(".//Content-Length", "")) for key, entry in found.items()}

    def uploads(self, prefix: str = "") -> list[Upload]:
        """Returns the keys that have parts alone, which were not put together."""
        whole = self._list(prefix, "")
        found = self._list(prefix, "uncommittedblobs")
        return [Upload(key, "") for key in sorted(found.keys() - whole.keys())]

    def remove(self, prefix: str) -> None:
        """Deletes the objects and the parts of keys that start with `prefix`."""
        for upload in self.uploads(prefix):
            self.put(upload.key, b"")  # in place of its parts
        for key in self.keys(prefix):
            self.delete(key)

    def _list(self, prefix: str, include: str) -> dict[str, ET.Element]:
        query = {"restype": "container", "comp": "list", "prefix": self._key(prefix)}
        if include:
            query["include"] = include
        found = {}
        while True:
            page = ET.fromstring(self._ask("GET", "", query))
            found.update({one.findtext("Name", ""): one for one in page.iterfind("Blobs/Blob")})
            query["marker"] = page.findtext("NextMarker") or ""
            if not query["marker"]:
                return found

    def _command(self) -> list[str]:
        options = ["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck"]
        return ["node", "-e", _MAIN, str(AZURITE), *options, "--disableTelemetry", "--silent"]

    def _variables(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}

    def headers(self) -> dict[str, str]:
        """Returns those of a helper call."""
        return {"x-ms-version": _VERSION, "x-ms-blob-type": "BlockBlob"}

    def target(self, key: str, query: dict[str, str] | None = None) -> str:
        """Returns the path and query of a helper call."""
        if not key and not query:  # the container itself, which is made
            query = {"restype": "container"}
        path = urllib.parse.quote(f"/{ACCOUNT}/{self.bucket}/{key}".rstrip("/"))
        return f"{path}?{urllib.parse.urlencode({**(query or {}), **self._signature})}"


def _account_signature() -> dict[str, str]:
    """Returns a query that lets whoever has it do everything, as Azure signs one."""
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + _VALID_S))
    values = {"sp": "rwdlac", "ss": "b", "srt": "sco", "st": "", "se": end, "sip": "", "spr": ""}
    text = "\n".join([ACCOUNT, *values.values(), _VERSION, "", ""])
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    signed = {"sv": _VERSION, **values, "sig": base64.b64encode(digest).decode()}
    return {name: value for name, value in signed.items() if value}
