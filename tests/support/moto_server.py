"""moto, an S3 server that others wrote, behind the helper calls of `ObjectServer`.

moto alone checks `If-None-Match` and stores the object in two steps, so that two of its threads
could both create one key. As S3 does, this server does one request after the other. It reads a
request's body before that, and refuses one that its client did not send to the end.

    python -m support.moto_server    prints its port; serves until its stdin is closed
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

from support.object_server import ObjectServer

# moto wants to be told who asks, and does not check it.
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
)


class MotoServer(ObjectServer):
    """As `ObjectServer`."""

    keeps_connections: ClassVar[bool] = False

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "support.moto_server"]

    def headers(self) -> dict[str, str]:
        """Returns those of a helper call."""
        return {"Authorization": _SIGNED}


# ---- In the server's process --------------------------------------------------------------------


class _OneByOne:
    """A WSGI application that gives another its requests one by one, each with its whole body."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if len(body) < length:
            start("400 Bad Request", [("Content-Length", "0")])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        with self._lock:
            answer = self._application(environ, start)
            try:
                return list(answer)
            finally:
                getattr(answer, "close", lambda: None)()


def _serve() -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line a request
    application = _OneByOne(DomainDispatcherApplication(create_backend_app))
    server = make_server(
        "127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()  # until the tests have ended, also where they were killed


if __name__ == "__main__":
    _serve()
