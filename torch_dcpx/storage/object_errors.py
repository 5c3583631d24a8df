"""Tells what errors of obstore mean: the code and text of the store itself, without a secret."""

from __future__ import annotations

import errno
import html
import os
import re
from typing import NamedTuple

from torch_dcpx._text import counted
from torch_dcpx.errors import StorageError
from torch_dcpx.storage.object_services import Service

_MAX_TEXT = 300
_MAX_READ = 16 << 10  # characters; an answer may be of any size
# Of what a store that is there refuses, each time.
REFUSED = frozenset({errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO})
ANSWERS = REFUSED | {errno.EEXIST, errno.ESTALE}  # by the store: no request is under way
_SECRETS = re.compile(
    r"(?i)((?:signature|credential|security-token|accesskeyid|account_?key|secret|password)"
    r"[\w-]*[=:>\"' ]+|\bsig=|\bbearer |\bsharedkey \w+:|\bMAC signature [\w ]+')"
    r"[^\s&<\"',}]+"
)
# Of a URL the host is of use: our texts name the object.
_URL = re.compile(r"\b(\w+)://(?:\S*@)?([^/\s?#]+)\S*")
# Of a request that nobody has answered.
_UNANSWERED = re.compile(
    r"Error performing \w+ (\w+)://(?:\S*@)?([^/\s?#]+)\S* in \S+?"
    r"(?:, after (\d+) retries[^-]*)? - HTTP error: error sending request"
)
_STATUS = re.compile(r"status code: ((\d{3})[A-Za-z ]*)(?:: (.*))?")
_STATUS_ALONE = re.compile(r"': \d{3}[A-Za-z ]*$")
_CODE = re.compile(r"<Code>\s*([\w.]{1,80})\s*</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>")
_CAUSE = re.compile(r'(?:message|error): "([^"\n]{1,200})"|(TimedOut)|(IncompleteMessage)')
_CAUSES = {"TimedOut": "it timed out", "IncompleteMessage": "the connection was closed"}
# Of the service that tells the machines of a cloud their credentials.
_ROLES = re.compile(r"://[^/\s]+/(?:latest/(?:api/token|meta-data)|metadata/identity/)")
_LACKS_KEY = re.compile(r"Missing (?:SecretAccessKey|AccessKeyId)")
_STORE = re.compile(r"^Generic \w+ error: ")
_REDIRECT = "redirect without LOCATION"
_ABORT = re.compile(r"Error performing DELETE \S+[?&]uploadId=")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
# Of status 400; others of it may be the network's.
_NO_ACCESS = frozenset(
    {"AuthorizationHeaderMalformed", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
)
# Classes of a panic of obstore: of a call, which is no Exception, and of an upload.
PANICS = frozenset({"PanicException", "RustPanic"})
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
    **dict.fromkeys(PANICS, errno.EINVAL),
}


class Said(NamedTuple):
    """Holds what a store has answered, or why nobody has."""

    number: int  # an errno; EIO where nobody tells what was done
    code: str  # the store's own; "": its answer has none
    text: str  # one short line


def said(error: BaseException, service: Service) -> Said:
    """Returns what an error of obstore means."""
    whole, _, debug = str(error).partition("\n\nDebug source")
    whole = _STORE.sub("", " ".join(whole.split()))[:_MAX_READ]
    found = _CODE.search(whole)
    code = found[1] if found else ""
    number = _errno_of(error, whole, code)
    if number == errno.ENOENT and code != "NoSuchUpload":
        return Said(number, "", os.strerror(number))
    if number == errno.ENXIO:
        return Said(number, code, f"there is no such {service.container}")
    if _ROLES.search(whole) or _LACKS_KEY.search(whole):
        return Said(number, code, f"no credentials: {service.no_credentials}")
    if _REDIRECT in whole:
        return Said(number, code, f"the {service.container} lies in another region: set AWS_REGION")
    text = _short(_text_of(error, whole, code, debug))
    if _ABORT.search(whole):  # which comes behind the error of the upload, and hides it
        text = (
            f"the upload ended early, its parts stay until a rule of the {service.container} "
            f"removes them: {text}"
        )
    return Said(number, code, text)


def lacks_words(error: StorageError) -> bool:
    """Whether an error has a status for all that the store has said, as each of a HEAD."""
    return _STATUS_ALONE.search(str(error)) is not None


def _errno_of(error: BaseException, whole: str, code: str) -> int:
    if code in _NO_BUCKET:
        return errno.ENXIO
    number = _ERRNOS.get(type(error).__name__)
    if number is not None:
        return number
    if _REDIRECT in whole:
        return errno.EINVAL
    status = _STATUS.search(whole)
    is_refused = status is not None and status[2] in ("401", "403")
    if is_refused or code in _NO_ACCESS or _ROLES.search(whole) or _LACKS_KEY.search(whole):
        return errno.EACCES
    is_unknown = code == "NotImplemented" or (status is not None and status[2] == "501")
    return errno.EOPNOTSUPP if is_unknown else errno.EIO


def _text_of(error: BaseException, whole: str, code: str, debug: str) -> str:
    kind = type(error).__name__
    if kind in PANICS:
        return f"obstore has panicked at a setting or an answer that it cannot read: {whole}"
    message = _MESSAGE.search(whole)
    status = _STATUS.search(whole)
    if code and message and message[1].strip():
        return html.unescape(message[1].partition("RequestId:")[0].strip())
    if status is not None:  # no store's answer has both neither code nor words, but to a HEAD
        words = "" if code else (status[3] or "").strip()
        return f"{status[1].strip()}: {words}" if words else status[1].strip()
    unanswered = _UNANSWERED.search(whole)
    if unanswered is not None:
        scheme, host, tries = unanswered.groups()
        cause = _CAUSE.search(debug)
        why = f": {cause[1] or _CAUSES[cause[0]]}" if cause else ""
        times = f" ({counted(int(tries), 'retry', 'retries')})" if tries and tries != "0" else ""
        return f"no answer from {scheme}://{host}{why}{times}"
    return whole if kind == "GenericError" else f"{kind}: {whole}"


def _short(text: str) -> str:
    text = _URL.sub(r"\1://\2", _SECRETS.sub(r"\1...", text))
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
