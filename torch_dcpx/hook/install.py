"""`install`, `uninstall`, `use`: DCP's classes come out as ours, wherever code makes them.

`__new__` of exactly the stock classes is replaced, not their names: so every module that imported
them is reached, and no subclass is. The `__new__` stays in its class for good: Python refuses
arguments to a class whose own `__new__` was deleted.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import inspect
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.staging import DefaultStager

from torch_dcpx._arguments import check_bool, check_choice, check_options, checked_globals
from torch_dcpx._version import __version__
from torch_dcpx.errors import OptionError
from torch_dcpx.hook.autoload import WAITING
from torch_dcpx.hook.blocks import Blocks
from torch_dcpx.hook.forkserver import ForkserverWatch
from torch_dcpx.hook.settings import (
    INSTALL,
    VARIABLES,
    Settings,
    is_asked,
    is_autoload_off,
    settings_from_environment,
    variables_of,
)
from torch_dcpx.options import ReadOptions, WriteOptions
from torch_dcpx.reports import REPLACED

logger = logging.getLogger("torch_dcpx")

_ROLE_OF: dict[type, str] = {
    FileSystemWriter: "writer",
    FileSystemReader: "reader",
    DefaultSavePlanner: "planners",
    DefaultLoadPlanner: "planners",
    DefaultStager: "stager",
}
_FORMAT_AT = 8  # the place of `serialization_format` among the arguments of FileSystemWriter
_URL_FORMAT_AT = 7  # and of FsspecWriter
_URL_ARGUMENTS = frozenset(
    {
        "path",
        "single_file_per_rank",
        "sync_files",
        "thread_count",
        "per_thread_copy_ahead",
        "overwrite",
        "_extensions",
        "serialization_format",
    }
)
_URL_CLASSES = {"FsspecWriter": "writer", "FsspecReader": "reader"}
_URL_MODULE = "torch.distributed.checkpoint._fsspec_filesystem"


def _url_roles() -> dict[type, str]:
    """Returns DCP's classes for URLs, where a URL could be one for ours: they need fsspec."""
    if not all(map(importlib.util.find_spec, ("fsspec", "obstore"))):
        return {}
    module = importlib.import_module(_URL_MODULE)
    return {getattr(module, name): role for name, role in _URL_CLASSES.items()}


_Variables = dict[str, str | None]


class _Hook:
    """Knows what is on in this process. All changes are made under its lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings: Settings | None = None
        self.before: _Variables = {}  # variables, as they were without `install`
        # Of `use`; with the settings, `before` and the variables as they were.
        self.blocks: Blocks[tuple[Settings | None, _Variables, _Variables]] = Blocks()
        self.is_patched = False
        self._forkserver = ForkserverWatch()

    def set(self, settings: Settings | None, variables: Mapping[str, str | None]) -> None:
        """Switches to settings, and gives children these variables."""
        if settings is not None and not self.is_patched:
            for stock, role in (_ROLE_OF | _url_roles()).items():
                stock.__new__ = staticmethod(_new_of(stock, role))  # type: ignore[method-assign]
                stock.__signature__ = _Signature()  # type: ignore[attr-defined]
                if stock.__name__ in _URL_CLASSES:
                    stock.validate_checkpoint_id = _validation_of(stock, role)  # type: ignore[attr-defined]
            atexit.register(_tell_if_unused, os.getpid())
            self.is_patched = True
        self.settings = settings
        before = _variables()
        for name, text in variables.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        self._forkserver.note_change(before, _variables())


def _variables() -> _Variables:
    return {name: os.environ.get(name) for name in VARIABLES}


_hook = _Hook()


def install(
    *,
    writer: bool = True,
    reader: bool = True,
    planners: bool = True,
    stager: bool = True,
    write_options: WriteOptions | None = None,
    read_options: ReadOptions | None = None,
    durability: Literal["caller", "full"] = "caller",
    safe_globals: Iterable[type | Callable[..., Any] | str] = (),
    trusted: bool = False,
) -> None:
    """Makes code that makes DCP's own classes get ours, in this process and in its children.

        import torch_dcpx
        torch_dcpx.install()

    `FileSystemWriter(...)` then gives a `DcpxWriter`, and so on: in frameworks, in `dcp.save` with
    only a path, in modules that were imported before. `FsspecWriter` and `FsspecReader` of an
    `s3://` URL give ours, too, where fsspec and obstore are installed. Subclasses stay as they are,
    and so do other URLs and SAFETENSORS. Environment variables carry the settings to processes that
    start from here, where torch switches the hook on as it is imported, unless
    TORCH_DEVICE_BACKEND_AUTOLOAD=0. A second call replaces the settings of the first.

    Args:
        writer: replace `FileSystemWriter` by `DcpxWriter`. Default True.
        reader: replace `FileSystemReader` by `DcpxReader`. Default True.
        planners: replace `DefaultSavePlanner` and `DefaultLoadPlanner` by `DcpxSavePlanner` and
            `DcpxLoadPlanner`. Default True.
        stager: replace `DefaultStager` by a `DcpxStager`. Default True.
        write_options: of every writer, and the memory and deadline of every stager. They count
            where the code that makes the writer says something else: `workers` for its
            `thread_count`, `files_per_rank` for its `single_file_per_rank`. Default None:
            `WriteOptions()`.
        read_options: of every reader. Default None: `ReadOptions()`.
        durability: "caller" (default): `sync_files=False` of the code that makes a writer is
            `durability="none"`, True is "full", and where it says nothing `write_options` decide.
            "full": every save survives a power cut, whatever that code says.
        safe_globals: of every reader, as in `ReadOptions`.
        trusted: of every reader, as in `ReadOptions`. No variable carries it: a child that reads
            raises UnsupportedError. Default False.

    Raises:
        OptionError: an argument that cannot work, or two that contradict each other.
    """
    roles = {"writer": writer, "reader": reader, "planners": planners, "stager": stager}
    settings = _checked(roles, write_options, read_options, durability, safe_globals, trusted)
    _switch_on(settings)


def _checked(
    switches: dict[str, bool],
    write_options: WriteOptions | None,
    read_options: ReadOptions | None,
    durability: Literal["caller", "full"],
    safe_globals: Iterable[Any],
    trusted: bool,
) -> Settings:
    """Returns the settings of arguments of `install`. Raises: as `install`."""
    for name, value in switches.items():
        check_bool(name, value)
    check_options("write_options", write_options, WriteOptions)
    check_options("read_options", read_options, ReadOptions)
    check_choice("durability", durability, ("caller", "full"))
    safe_globals = checked_globals(safe_globals)
    check_bool("trusted", trusted)
    roles = frozenset(name for name, is_on in switches.items() if is_on)
    if not roles:
        wrong = "install: nothing is left to replace; uninstall() goes back"
        raise OptionError(wrong, option="writer", value=False)
    write_options = write_options or WriteOptions()
    if durability == "full" and write_options.durability != "full":
        raise OptionError(
            f'durability="full" contradicts write_options.durability='
            f"{write_options.durability!r}; give one of them",
            option="durability",
            value=durability,
        )
    read_options = read_options or ReadOptions()
    own = (*read_options.safe_globals, *safe_globals)
    read_options = replace(read_options, safe_globals=own, trusted=trusted or read_options.trusted)
    return Settings(roles, durability, write_options, read_options)


def _switch_on(settings: Settings) -> None:
    with _hook.lock:
        if _hook.settings is None:
            _hook.before = _variables()
        _hook.set(settings, variables_of(settings))
    _tell(settings, "install()")


def uninstall() -> None:
    """Makes DCP's classes stock's again, in this process and in children that start from now on.

    Objects of ours that are there stay ours. Without `install` it does nothing.
    """
    with _hook.lock:
        if _hook.settings is not None:
            _hook.set(None, {**_hook.before, INSTALL: None})


def use(
    *,
    writer: bool = True,
    reader: bool = True,
    planners: bool = True,
    stager: bool = True,
    write_options: WriteOptions | None = None,
    read_options: ReadOptions | None = None,
    durability: Literal["caller", "full"] = "caller",
    safe_globals: Iterable[type | Callable[..., Any] | str] = (),
    trusted: bool = False,
) -> AbstractContextManager[None]:
    """`install`, and at the end of the block what was before: for the whole process.

    Other threads get our classes, too, as long as the block lasts. Of blocks that overlap, as in
    threads or tasks, the one that began last counts until it ends.

    Args, Raises: as `install`.
    """
    roles = {"writer": writer, "reader": reader, "planners": planners, "stager": stager}
    settings = _checked(roles, write_options, read_options, durability, safe_globals, trusted)
    return _used(settings)


@contextmanager
def _used(settings: Settings) -> Iterator[None]:
    with _hook.lock:
        before = _hook.settings, _hook.before, _variables()
        _switch_on(settings)
        block = _hook.blocks.begin(before)
    try:
        yield
    finally:
        with _hook.lock:
            if _hook.blocks.end(block):
                settings_before, _hook.before, variables = block.before
                _hook.set(settings_before, variables)


def install_from_environment() -> None:
    """Installs what the variables say. For the entry point of torch.backends."""
    if not is_asked():  # any more
        return
    settings = settings_from_environment()
    with _hook.lock:
        if _hook.settings is not None:
            return  # code has called `install`, which counts
        _hook.before = _variables()
        _hook.set(settings, {})
    _tell(settings, f"{INSTALL}={os.environ.get(INSTALL)}")


def _tell(settings: Settings, by: str) -> None:
    names = ", ".join(stock.__name__ for stock, role in _ROLE_OF.items() if role in settings.roles)
    text = "uninstall() or TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it off"
    if is_autoload_off():
        text = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it from child processes"
    message = "torch-dcpx %s takes the place of %s in this process (%s); %s"
    logger.info(message, __version__, names, by, text)


def _tell_if_unused(installed_in: int) -> None:
    """Warns, as the process ends, if the hook was on for nothing. No helper is warned: a forked
    child, a daemon of multiprocessing; nor a process whose saves such a daemon makes, nor `dcpx`.
    """
    is_helper = os.getpid() != installed_in or multiprocessing.current_process().daemon
    is_helper |= "torch_dcpx.cli.app" in sys.modules
    executor = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    has_daemon = getattr(executor, "_CHECKPOINT_PROCESS", None) is not None
    if _hook.settings is not None and not REPLACED and not is_helper and not has_daemon:
        logger.warning(
            "the hook of torch-dcpx was on, but nothing in this process made a writer, reader, "
            "planner or stager of torch.distributed.checkpoint: no checkpoint went through it"
        )


def _new_of(stock: Any, role: str) -> Callable[..., Any]:
    """Returns the `__new__` of a stock class."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        settings = _hook.settings
        if (
            cls is stock
            and settings is not None
            and role in settings.roles
            and _is_taken(stock, role, args, kwargs)
        ):
            settings.check_complete(role)
            made = _made(stock, settings)
            if stock.__name__ in _URL_CLASSES:  # it is none of them: Python calls no `__init__`
                made.__init__(*args, **kwargs)
            REPLACED[role] += 1
            logger.debug("%s is %s (%s so far)", stock.__name__, type(made).__name__, REPLACED)
            return made
        inherited: Any = super(stock, cls).__new__
        if inherited is object.__new__:
            return inherited(cls)
        return inherited(cls, *args, **kwargs)

    new.__name__ = "__new__"
    return new


def _validation_of(stock: Any, role: str) -> Any:
    """Returns DCP's question whether a class for URLs takes a path. Its own asks fsspec, which
    needs a package for each store.
    """
    own = stock.validate_checkpoint_id

    def validate_checkpoint_id(cls: type, checkpoint_id: Any) -> Any:
        settings = _hook.settings
        is_on = cls is stock and settings is not None and role in settings.roles
        if is_on and isinstance(checkpoint_id, str) and checkpoint_id.startswith("s3://"):
            return True
        return own(checkpoint_id)

    return classmethod(validate_checkpoint_id)


class _Signature:
    """Gives `inspect.signature(cls)` that of `__init__`, though there is a `__new__`."""

    def __get__(self, _made: object, cls: type) -> inspect.Signature:
        init = inspect.signature(cls.__init__)  # type: ignore[misc]
        return init.replace(parameters=list(init.parameters.values())[1:])


def _is_taken(stock: type, role: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call is one for ours: of a path, and of DCP's own format; of DCP's classes
    for URLs, of `s3://` without settings for fsspec.
    """
    if role not in ("writer", "reader"):
        return True
    path = args[0] if args else kwargs.get("path")
    is_for_urls = stock.__name__ in _URL_CLASSES
    form_at = _URL_FORMAT_AT if is_for_urls else _FORMAT_AT
    form = args[form_at] if len(args) > form_at else kwargs.get("serialization_format")
    if not isinstance(path, (str, os.PathLike)):
        return False
    text = os.fsdecode(path)
    is_path = "://" not in text
    if is_for_urls:
        is_path = text.startswith("s3://") and kwargs.keys() <= _URL_ARGUMENTS
    return is_path and form in (None, SerializationFormat.TORCH_SAVE)


def _made(stock: type, settings: Settings) -> Any:
    """Returns an object of ours without its `__init__`, which Python calls next."""
    from torch_dcpx.hook.classes import ours_of  # loads the engine, at the first use

    role = _ROLE_OF.get(stock, "")
    made: Any = object.__new__(ours_of(stock))
    if role == "stager":
        options = settings.write_options
        made.dcpx_memory = options.host_memory_bytes, options.save_timeout_s
    elif role != "planners":  # writers and readers take the settings in their `__init__`
        made.dcpx_settings = settings
    if role in ("planners", "stager"):
        made.__init__()  # copies and pickles of stock's set only what stock has
    return made


if WAITING:
    install_from_environment()
