"""Tells the kinds of object stores apart: how obstore opens one, and what it lacks."""

from __future__ import annotations

import errno
import importlib
import os
import re
from typing import Any, NamedTuple

from torch_dcpx.errors import StorageError, UnsupportedError

_AUTHORITY = re.compile(r"[\w.~!$&'()*+,;=:@%\[\]-]+", re.ASCII)  # user, host and port of a URL


class Service(NamedTuple):
    """A kind of store, by the scheme of its URLs."""

    opener: str  # obstore's class
    container: str  # what its users call a bucket
    variables: tuple[str, ...]  # how the names of its environment variables begin
    endpoints: tuple[str, ...]  # of these the first that is set has its URL
    credentials: str  # variables with them, for texts
    other_credentials: str  # how those of its own command get there
    has_suffixes: bool  # takes a range that counts from the end
    deletes: int  # objects a request
    single_deletes: dict[str, Any]  # obstore's argument for one object a request
    unknown_tag: str  # an ETag that no object has

    @property
    def no_credentials(self) -> str:
        """Says where they are looked for, in an error."""
        return f"set {self.credentials}{self.other_credentials}; this machine gives no role"


SERVICES = {
    "s3": Service(
        opener="S3Store",
        container="bucket",
        variables=("AWS_",),
        endpoints=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        credentials="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        other_credentials=(
            ' (~/.aws is not read: eval "$(aws configure export-credentials --format env)" sets '
            "them from a profile)"
        ),
        has_suffixes=True,
        deletes=1000,
        single_deletes={"disable_bulk_delete": True},
        unknown_tag='"0"',
    ),
    "az": Service(
        opener="AzureStore",
        container="container",
        variables=("AZURE_", "AZURITE_"),
        endpoints=("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
        credentials="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
        other_credentials=" (a login of `az` is not read)",
        has_suffixes=False,
        deletes=256,
        single_deletes={},
        unknown_tag='"0x8D0000000000000"',
    ),
}


def import_obstore() -> Any:
    """Returns the package. Raises UnsupportedError where it is not installed."""
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        raise UnsupportedError(
            "URLs of stores need obstore, which is not installed: pip install obstore"
        ) from error


def settings_of(scheme: str) -> list[tuple[str, str]]:
    """Returns the environment variables that obstore may read for a store of this kind."""
    begins = SERVICES[scheme].variables
    return sorted(item for item in os.environ.items() if item[0].startswith(begins))


def endpoint_of(scheme: str, endpoint: str | None) -> str:
    """Returns the URL of a store's endpoint, "" where neither a caller nor a variable gives it."""
    return endpoint or next(filter(None, map(os.environ.get, SERVICES[scheme].endpoints)), "")


def opened(
    scheme: str, name: str, endpoint: str | None, client: dict[str, str], more: dict[str, Any]
) -> Any:
    """Returns obstore's store of one bucket.

    Args:
        endpoint: its URL; None: as obstore finds it.
        client: settings of its HTTP client.
        more: arguments of obstore's class.

    Raises StorageError: a setting of which obstore would panic: an endpoint that is no URL, or a
        variable with a control character.
    """
    service = SERVICES[scheme]
    opener = getattr(importlib.import_module("obstore.store"), service.opener)
    for variable, value in settings_of(scheme):
        if not _is_printable(value) and _is_known(opener, variable):
            raise StorageError(
                f"open '{scheme}://{name}': {variable} has a control character in it, such as the "
                "end of a line: set it without",
                errno=errno.EINVAL,
            )
    settings: dict[str, Any] = {"client_options": client}
    if endpoint is not None:
        settings["endpoint"] = endpoint
        if "AWS_ENDPOINT_URL_S3" in os.environ and scheme == "s3":  # else it comes first
            settings["aws_endpoint_url_s3"] = endpoint
    if scheme == "s3" and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        settings["unsigned_payload"] = True
    variable = next(filter(os.environ.get, service.endpoints), "")
    given = endpoint or os.environ.get(variable, "")
    if given and not _is_endpoint(given):
        what = "endpoint" if endpoint else variable
        raise StorageError(
            f"open '{scheme}://{name}': {what} is no URL such as 'http://minio:9000'",
            errno=errno.EINVAL,
        )
    if given.startswith("http://"):
        settings["client_options"] = {**client, "allow_http": True}
    return opener(name, **settings, **more)


def _is_printable(text: str) -> bool:
    return not any(one < " " or one == "\x7f" for one in text)


def _is_known(opener: Any, variable: str) -> bool:
    """Whether obstore reads an environment variable: others of such a name are somebody else's."""
    exceptions = importlib.import_module("obstore.exceptions")
    try:
        opener("known", config={variable: "x"})
    except exceptions.UnknownConfigurationKeyError:
        return False
    except exceptions.BaseError:  # of the value
        return True
    return True


def _is_endpoint(text: str) -> bool:
    from urllib.parse import urlsplit  # few have one

    if " " in text or not _is_printable(text):  # which urlsplit passes over
        return False
    try:
        parts = urlsplit(text)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        return is_whole and bool(_AUTHORITY.fullmatch(parts.netloc))
    except ValueError:  # a port that is none
        return False
