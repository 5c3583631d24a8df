"""Hooks of DCP's planners, writers and readers: which are stock's or ours, which nobody calls.

An overridden hook is called, or refused by name; never ignored. Where a planner's hooks are stock's
what they do is known without a call. Public methods are DCP's own hooks and work as with stock.
Stock's private methods, `fs` and `transforms` are parts of an engine that ours replaces: an
override would be passed over in silence. They are read from stock's classes, so that those of a
newer torch are refused as well. docs/howto/planners.md, "Subclasses", is the table of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, TypeVar

from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
    _StorageReaderTransforms,
    _StorageWriterTransforms,
)
from torch.distributed.checkpoint.planner import LoadPlanner

from torch_dcpx._arguments import check_type, checked_int
from torch_dcpx.errors import OptionError, UnsupportedError, must_be
from torch_dcpx.options import WriteOptions

_Planner = TypeVar("_Planner", bound=DefaultLoadPlanner)
_AnyPlanner = TypeVar("_AnyPlanner", bound=LoadPlanner)

_HOOKS = ("resolve_tensor", "lookup_tensor", "transform_tensor")
TAKING_HOOKS = ("commit_tensor", "load_bytes")
PLAN_HOOKS = ("create_local_plan", "create_global_plan", "finish_plan", *_HOOKS)
_LOOKUPS = ("get", "__getitem__", "__contains__")


def _torchs_own() -> dict[str, Any]:
    """Returns stock's hooks by name, without those replaced before this module was imported."""
    source = create_default_local_load_plan.__code__.co_filename
    hooks = {name: getattr(DefaultLoadPlanner, name) for name in (*PLAN_HOOKS, *TAKING_HOOKS)}
    return {
        name: hook
        for name, hook in hooks.items()
        if hasattr(hook, "__code__") and hook.__code__.co_filename == source
    }


_STOCK = _torchs_own()
_ANY_ORDER: set[type[LoadPlanner]] = set()
_OURS: dict[str, Any] = {}  # those of our planner that come to the same, by their names


def is_hook(plugin: object, name: str, *known: object) -> bool:
    """Returns whether a plugin's hook is one of the known ones, in its class and in itself."""
    return getattr(type(plugin), name) in known and name not in vars(plugin)


def has_hooks(plugin: object, known: Mapping[str, object]) -> bool:
    """Returns whether all hooks of a plugin that are `known`, by name, are the known ones."""
    return all(is_hook(plugin, name, hook) for name, hook in known.items())


def is_own(plugin: object, cls: type, *names: str) -> bool:
    """Returns whether the hooks `names` of a plugin are those that `cls` has now."""
    return all(is_hook(plugin, name, getattr(cls, name)) for name in names)


def takes(hook: Callable[..., Any], parameter: str) -> bool:
    """Returns whether a hook has a parameter of this name: subclasses may lack newer ones."""
    return parameter in _parameters(getattr(hook, "__func__", hook))


@lru_cache(maxsize=64)  # a look takes 40 us, twice in each save and load
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def plans_as_stock(planner: type[_Planner]) -> type[_Planner]:
    """Says that a class' own hooks plan and take as stock's do."""
    hooks = (*PLAN_HOOKS, *TAKING_HOOKS)
    _OURS.update({name: vars(planner)[name] for name in hooks if name in vars(planner)})
    return planner


def takes_in_any_order(planner: type[_AnyPlanner]) -> type[_AnyPlanner]:
    """Says that a class gives each item memory of its own, and takes what was read in any order."""
    _ANY_ORDER.add(planner)
    return planner


def is_any_order(planner: LoadPlanner) -> bool:
    """Returns whether many items of the planner may be under way at once."""
    return type(planner) in _ANY_ORDER


def has_stock_hooks(planner: LoadPlanner, names: Iterable[str] = _HOOKS) -> bool:
    """Returns whether the planner's hooks `names` are stock's, or do what stock's do; by default
    those whose stock form hands out views of the state's own tensors.
    """
    return isinstance(planner, DefaultLoadPlanner) and all(
        name in _STOCK and is_hook(planner, name, _STOCK[name], _OURS.get(name)) for name in names
    )


def has_plain_state(planner: object) -> bool:
    """Returns whether the planner's state is a dict that answers as dicts do."""
    state = type(getattr(planner, "state_dict", None))
    return issubclass(state, dict) and all(
        getattr(state, name) is getattr(dict, name) for name in _LOOKUPS
    )


# ---- Writers and readers ---------------------------------------------------------------------

Plugin = FileSystemWriter | FileSystemReader
OWN_FILE_SYSTEMS: list[type] = []  # that our engine knows beside stock's

_STOCK_MODULE = FileSystemWriter.__module__
_HONOURED = {"_get_metadata_path", "_metadata_exists"}
_TRANSFORMS = (_StorageWriterTransforms, _StorageReaderTransforms)


@cache  # it takes a tenth of a small save
def _bypassed(ours: type[Plugin]) -> tuple[str, ...]:
    """Returns the private methods of stock's class that `ours` never calls."""
    kinds = (classmethod, staticmethod, property)
    return tuple(
        name
        for stock in ours.__mro__
        if stock.__module__ == _STOCK_MODULE
        for name, value in vars(stock).items()
        if name.startswith("_") and not name.startswith("__") and name not in _HONOURED
        if callable(value) or isinstance(value, kinds)
    )


def refuse_bypassed(plugin: Plugin, ours: type[Plugin]) -> None:
    """Raises UnsupportedError for what a subclass of `ours`, or an instance, replaces in vain."""
    for name in _bypassed(ours):
        if not is_own(plugin, ours, name):
            raise UnsupportedError(
                f"{type(plugin).__name__} overrides `{name}`, which the engine of {ours.__name__} "
                f"does not call; use torch's own {ours.__bases__[0].__name__} for it"
            )
    stock_parts = {
        "fs": type(plugin.fs) in (FileSystem, *OWN_FILE_SYSTEMS)
        and not any(name in dir(FileSystem) for name in vars(plugin.fs)),
        "transforms": type(plugin.transforms) in _TRANSFORMS,
    }
    for name, is_stock in stock_parts.items():
        if not is_stock:
            kind = type(getattr(plugin, name))
            raise UnsupportedError(
                f"{ours.__name__} goes through its own engine, which would bypass the replaced "
                f"`{name}` ({kind.__module__}.{kind.__qualname__}); use torch's own "
                f"{ours.__bases__[0].__name__} for it"
            )


def refuse_changed(writer: FileSystemWriter, options: WriteOptions) -> None:
    """Refuses attributes of stock's, set now or later, that ask for what cannot be done.

    Raises:
        UnsupportedError: another serialization format.
        OptionError: `sync_files` or `single_file_per_rank` contradicts the options, or an
            attribute is of another type than stock takes.
    """
    _check_stock_arguments(writer)
    if writer.serialization_format != SerializationFormat.TORCH_SAVE:
        raise UnsupportedError(
            f"serialization_format={writer.serialization_format} is not written by DcpxWriter; use "
            "torch's HuggingFaceStorageWriter for safetensors"
        )
    is_durable = options.durability == "full"
    if writer.sync_files != is_durable:
        raise OptionError(
            f"sync_files was set to {writer.sync_files} on a writer made with {is_durable}; give "
            "it to the constructor",
            option="sync_files",
            value=writer.sync_files,
        )
    if not writer.single_file_per_rank and options.files_per_rank > 1:
        raise OptionError(
            f"single_file_per_rank=False, a file for each item, contradicts files_per_rank="
            f"{options.files_per_rank}; give one of them",
            option="files_per_rank",
            value=options.files_per_rank,
        )


def _check_stock_arguments(writer: Any) -> None:
    """Raises OptionError for an argument of `FileSystemWriter` of another type than stock takes."""
    for name in ("single_file_per_rank", "cache_staged_state_dict", "overwrite"):
        check_type(name, getattr(writer, name), int, "True or False")  # as stock, 0 and 1, too
    name = "per_thread_copy_ahead"
    writer.per_thread_copy_ahead = checked_int(name, writer.per_thread_copy_ahead, 0, 1 << 60)
    name = "serialization_format"
    check_type(name, writer.serialization_format, SerializationFormat, "SerializationFormat")
    extensions, wanted = writer.transforms.extensions, "None or a list of StreamTransformExtension"
    check_type("_extensions", extensions, Sequence, wanted)
    for one in extensions:
        if isinstance(one, type) or not callable(getattr(one, "transform_to", None)):
            raise must_be("_extensions", one, wanted)


_SWITCHES = (
    "flatten_state_dict",
    "flatten_sharded_tensors",
    "allow_partial_load",
    "dedup_save_to_lowest_rank",
)


def check_switches(planner: object) -> None:
    """Raises OptionError for an argument of a default planner that is no switch."""
    for name in _SWITCHES:
        check_type(name, getattr(planner, name, False), int, "True or False")  # as with stock
