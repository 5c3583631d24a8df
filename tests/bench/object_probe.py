"""What benches of stores share: a client of their own S3 server, and a figure with its range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from obstore.store import S3Store


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
