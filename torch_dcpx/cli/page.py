"""Writes a page of `--html`: one file with its data, a style and our scripts in it.

It asks no network for anything, and its content security policy lets it ask none. That policy
runs the scripts of the package alone, by their digests: a name in a checkpoint that broke out of
the data would still be no script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any, Literal

from torch_dcpx._replacing import Replacing
from torch_dcpx._text import human_bytes
from torch_dcpx.cli.output import put_lines
from torch_dcpx.errors import OptionError
from torch_dcpx.storage.directory import storage_errors
from torch_dcpx.storage.place import PosixPlace

# In JSON they stand in texts alone, so that another way to write them changes nothing.
_ESCAPES = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&"})
_OWN_MARK = b'<meta name="generator" content="dcpx">'
_MARK_WITHIN_BYTES = 200
_SCRIPTS = {
    "inspect": ("modules.js", "inspect.js", "showInspected();"),
    "diff": ("modules.js", "diff.js", "showDiff();"),
    "trace": ("trace.js", "showTrace();"),
}


class Page:
    """A file that a page is written to."""

    def __init__(self, path: Path, *, is_replacing: bool) -> None:
        """Looks at `path`, before a command begins what may take long.

        Raises:
            OptionError: it ends in no `.html`, or is there. With `is_replacing` a page of ours may
                be there.
            StorageError: its directory cannot be opened.
        """
        if path.suffix.lower() not in (".html", ".htm"):
            raise _wrong(path, f"'{path}' is no name of a page: it must end in .html")
        with PosixPlace(path.parent):
            pass
        self._rule = Replacing(is_replacing, _is_own, "page that dcpx has written", "html")
        self._rule.check(path)
        self.path = path
        self.nbytes = 0

    def write(self, kind: Literal["inspect", "diff", "trace"], data: dict[str, Any]) -> None:
        """Writes the page beside, then renames it. Raises: OptionError, StorageError; then there is
        none.
        """
        text = _rendered(kind, data).encode()
        with storage_errors("write", self.path):
            self._rule.put(self.path, text)
        self.nbytes = len(text)


def put_written(page: Page | None) -> None:
    """Prints the line about a page, if there is one."""
    if page is not None:
        put_lines([f"wrote '{page.path}', {human_bytes(page.nbytes)}"])


def _wrong(path: Path, message: str) -> OptionError:
    return OptionError(message, option="html", value=str(path))


def _is_own(path: Path) -> bool:
    if path.is_symlink():
        return False
    with storage_errors("read", path, is_read=True), path.open("rb") as file:
        return _OWN_MARK in file.read(_MARK_WITHIN_BYTES)


def _rendered(kind: str, data: dict[str, Any]) -> str:
    *scripts, call = _SCRIPTS[kind]
    own = "".join(map(_asset, ("common.js", *scripts))) + call
    return Template(_asset("page.html")).substitute(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {_digest(own)}; "
        "base-uri 'none'; form-action 'none'",
        style=_asset("page.css"),
        data=_json(data).translate(_ESCAPES),
        script=own,
    )


def _json(data: Any) -> str:
    """Returns data as JSON; infinities and NaN, which it lacks, are the texts "inf" and "nan"."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not isfinite(data) else data


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _asset(name: str) -> str:
    return (files("torch_dcpx.cli") / "pages" / name).read_text(encoding="utf-8")
