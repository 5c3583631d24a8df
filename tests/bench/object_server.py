"""The S3 server of tests for benches: it drops data, waits before it answers, and counts;
a client of it, and a figure with its range.

with ObjectServer(mode="keep", core=1) as server:
    ...  # a client of server.endpoint: any bucket, any key, any credentials
    server.stats()["requests"]["UploadPart"]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from obstore.store import S3Store

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import object_server
from support.s3_bucket import BLOCK_BYTES, GROWTH_BYTES

__all__ = ["BLOCK_BYTES", "GROWTH_BYTES", "ObjectServer", "make_store", "spread"]


class ObjectServer(object_server.ObjectServer):
    """A server in a process of its own, from `with` to its end."""

    def __init__(
        self,
        *,
        mode: str = "keep",
        latency_ms: float = 0.0,
        core: int | None = None,
        memory_mib: int = 0,
    ) -> None:
        """Starts it.

        Args:
            mode: `keep` or `drop` (s3_server.py).
            latency_ms: delay before each answer.
            core: the core that the server stays on. None: any.
            memory_mib: memory for bodies that is touched at once. More is taken as it is needed.
        """
        options = ["--mode", mode, "--memory-mib", str(memory_mib)]
        options += ["--latency-ms", str(latency_ms)]
        super().__init__(options=options if core is None else [*options, "--core", str(core)])
        self.endpoint = self.url
        self.reset()

    def __enter__(self) -> ObjectServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Returns what was asked since the last reset: `requests` by kind, bytes, `cpu_s`."""
        found: dict[str, Any] = json.loads(self.ask("GET", "/__stats__"))
        return found

    def reset(self, *, latency_ms: float | None = None, is_empty: bool = False) -> None:
        """Sets the counts to 0.

        Args:
            latency_ms: the delay from now on. None: as it is.
            is_empty: removes all objects and uploads.
        """
        delay = "" if latency_ms is None else f"&latency_ms={latency_ms}"
        self.ask("POST", f"/__reset__?empty={int(is_empty)}{delay}")


def make_store(endpoint: str, **options: Any) -> S3Store:
    """Returns a store of the server; `options` default to requests signed without their payload."""
    return S3Store(
        "bench",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="key",
        secret_access_key="secret",
        client_options={"allow_http": True, "timeout": "300s"},
        **(options or {"unsigned_payload": True}),
    )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median and the range, as text."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
