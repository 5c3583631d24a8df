"""`dcpx run`: one command with the hook on."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NoReturn

from torch_dcpx.errors import OptionError, StorageError
from torch_dcpx.hook.settings import AUTOLOAD, INSTALL, is_asked, is_autoload_off


def run_with_hook(command: Sequence[str]) -> NoReturn:
    """Replaces this process by a command with DCPX_INSTALL; keeps a value that it has.

    Raises:
        OptionError: torch's switch keeps the hook off.
        StorageError: there is no such command, or it cannot run.
    """
    if is_autoload_off():
        value = os.environ[AUTOLOAD]
        wrong = f"{AUTOLOAD}={value} keeps the hook off in every process: unset it"
        raise OptionError(wrong, option=AUTOLOAD, value=value)
    if not is_asked():
        os.environ[INSTALL] = "1"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and so would the command
    try:
        os.execvp(command[0], list(command))  # noqa: S606  (the user's own)
    except OSError as error:
        text = f"run '{command[0]}': {error.strerror}"
        raise StorageError(text, errno=error.errno, path=command[0]) from error
