"""Tells what errors of obstore mean, in texts without a secret."""

from __future__ import annotations

import errno
import os
import re

_MAX_TEXT = 300
_SECRETS = re.compile(
    r"(?i)((?:signature|credential|security-token|accesskeyid|account_?key|secret|password)"
    r"[\w-]*[=:>\"' ]+|\bsig=|\bbearer |\bsharedkey \w+:|\bMAC signature [\w ]+')"
    r"[^\s&<\"',}]+"
)
_USERS = re.compile(r"//[^/@\s]+@")  # of an endpoint's URL
# Of Azure, where obstore has one class for all errors of a batch.
_REFUSED_BATCH = re.compile(r"bulk delete request: .* status code: 40[13] ")
_ERRNOS = {
    "NotFoundError": errno.ENOENT,
    "FileNotFoundError": errno.ENOENT,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "PreconditionError": errno.ESTALE,
    "AlreadyExistsError": errno.EEXIST,
    "InvalidPathError": errno.EINVAL,
    "NotSupportedError": errno.EOPNOTSUPP,
    "UnknownConfigurationKeyError": errno.EINVAL,
}


def errno_of(error: Exception) -> int:
    """Returns the errno of an error of obstore; EIO where it does not tell what was answered."""
    if _REFUSED_BATCH.search(str(error)):
        return errno.EACCES
    return _ERRNOS.get(type(error).__name__, errno.EIO)


def told(error: Exception, number: int) -> str:
    """Returns an error of obstore as one short line."""
    if number == errno.ENOENT:
        return os.strerror(number)
    text = str(error).partition("\n\nDebug source")[0]
    text = _SECRETS.sub(r"\1...", " ".join(text.split()))
    text = _USERS.sub("//...@", text)
    shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return f"{type(error).__name__}: {shown}"
