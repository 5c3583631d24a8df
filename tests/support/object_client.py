"""obstore's own client of a test's store, with the retries that the test wants."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from support.machine import seconds


def opened(url: str, retries: int = 0) -> Any:
    """Returns the store at a URL, as the environment says; it repeats a request almost at once."""
    from obstore.store import from_url

    short, long = timedelta(milliseconds=1), timedelta(milliseconds=5)
    return from_url(
        url,
        # Options in the call replace AWS_ALLOW_HTTP; 30 s, the default, can pass on a busy machine.
        client_options={"allow_http": True, "timeout": f"{seconds(120):.0f}s"},
        retry_config={
            "max_retries": retries,
            "backoff": {"init_backoff": short, "max_backoff": long, "base": 2},
        },
    )
