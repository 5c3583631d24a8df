"""Tells the kinds of object stores apart: how obstore opens one, and what it lacks."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple


class Service(NamedTuple):
    """A kind of store, by the scheme of its URLs."""

    opener: str  # obstore's class
    container: str  # what its users call a bucket
    variables: tuple[str, ...]  # how the names of its environment variables begin
    endpoints: tuple[str, ...]  # of these the first that is set has its URL
    credentials: str  # variables with them, for texts
    has_suffixes: bool  # takes a range that counts from the end
    deletes: int  # objects a request
    unknown_tag: str  # an ETag that no object has


SERVICES = {
    "s3": Service(
        opener="S3Store",
        container="bucket",
        variables=("AWS_",),
        endpoints=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        credentials="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        has_suffixes=True,
        deletes=1000,
        unknown_tag='"0"',
    ),
    "az": Service(
        opener="AzureStore",
        container="container",
        variables=("AZURE_", "AZURITE_"),
        endpoints=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        credentials="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        has_suffixes=False,
        deletes=256,
        unknown_tag='"0x8D0000000000000"',
    ),
}


def settings_of(scheme: str) -> list[tuple[str, str]]:
    """Returns the environment variables that obstore may read for a store of this kind."""
    begins = SERVICES[scheme].variables
    return sorted(item for item in os.environ.items() if item[0].startswith(begins))


def opened(scheme: str, name: str, endpoint: str | None, more: dict[str, Any]) -> Any:
    """Returns obstore's store of one bucket.

    Args:
        endpoint: its URL; None: as obstore finds it.
        more: arguments of obstore's class.
    """
    service = SERVICES[scheme]
    settings: dict[str, Any] = {}
    if endpoint is not None:
        settings["endpoint"] = endpoint
    if scheme == "s3" and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        settings["unsigned_payload"] = True
    given = endpoint or next(filter(None, map(os.environ.get, service.endpoints)), "")
    if given.startswith("http://"):
        settings["client_options"] = {"allow_http": True}
    opener = getattr(importlib.import_module("obstore.store"), service.opener)
    return opener(name, **settings, **more)
