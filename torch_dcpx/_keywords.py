"""Mistyped keywords: a TypeError of a public call says which name was meant, or where it belongs.

`torch_dcpx.__getattr__` wraps what it hands out; adapters to frameworks wrap themselves. A call
that is right costs a frame. Names of other libraries are known. Imports no torch.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch_dcpx.options import ReadOptions, WriteOptions

# What it is called here -> its names in torch, Hugging Face, Lightning, Orbax, torchtitan, others.
_OTHERS: Mapping[str, str] = {
    "lr_scheduler": "scheduler schedulers lr_schedulers sched lr_sched",
    "optimizer": "optim optimizers opt optims",
    "model": "module net network models model_parts",
    "dataloader": "data_loader train_dataloader train_loader loader dataloaders datamodule",
    "state": "extra extra_state app_state extras train_state training_state items client_state",
    "user_content": "content user_data extra_metadata meta custom_metadata",
    "state_dict": "state states state_dicts sd obj model_state model items tree pytree app_state",
    "keep_last": "max_to_keep save_total_limit keep_latest_k keep_last_n keep_n keep num_to_keep "
    "max_checkpoints n_saved total_limit keep_latest retention",
    "keep_best": "save_top_k best_fn keep_best_k top_k load_best_model_at_end monitor",
    "keep_every": "keep_period keep_checkpoint_every_n_steps keep_interval save_on_steps",
    "save_every": "save_interval_steps save_steps every_n_train_steps every_n_steps save_interval "
    "interval every checkpoint_interval save_freq",
    "save_every_s": "train_time_interval save_interval_s keep_time_interval",
    "async_save": "enable_async_checkpointing async_mode asynchronous is_async async_checkpoint "
    "enable_async",
    "root": "path directory dirpath dir folder output_dir checkpoint_dir ckpt_dir save_dir "
    "checkpoint_id base_path ckpt_path project_dir",
    "checkpoint_id": "path directory dirpath dir folder filename file output_dir checkpoint_dir "
    "ckpt_dir save_dir checkpoint_path ckpt_path filepath save_directory f resume_from ckpt",
    "path": "checkpoint_id directory dirpath dir folder filename file output_dir checkpoint_dir "
    "ckpt_dir save_dir checkpoint_path ckpt_path filepath save_directory out dest "
    "pretrained_model_name_or_path checkpoint src root ckpt",
    "tag": "step step_num version checkpoint name resume_from_checkpoint ckpt which",
    "tag_or_step": "tag step name version epoch global_step",
    "tag_or_model": "tag step model checkpoint source",
    "allow_missing": "ignore_missing ignore_keys missing_ok ignore_mismatched_sizes "
    "allow_partial_load",
    "cast": "dtype torch_dtype cast_dtype convert_dtypes",
    "dtype": "torch_dtype precision cast_dtype",
    "strict": "partial partial_restore strict_loading",
    "key_map": "translate mapping rename key_mapping transforms rename_map state_dict_adapter",
    "translate": "key_map mapping rename key_mapping transforms",
    "keys": "names include only filter patterns key name tensors",
    "device": "map_location device_map",
    "max_shard_bytes": "max_shard_size shard_size max_file_size",
    "format": "file_format safe_serialization serialization fmt",
    "overwrite": "force exist_ok replace clobber",
    "source": "model state_dict checkpoint checkpoint_id src module",
    "process_group": "group pg comm",
    "storage_writer": "writer",
    "storage_reader": "reader",
    "options": "write_options save_options config",
    "read_options": "load_options restore_options",
    "write_options": "options",
    "workers": "num_workers threads num_threads thread_count n_threads io_workers max_workers "
    "concurrency",
    "save_timeout_s": "timeout timeout_s timeout_secs",
    "load_timeout_s": "timeout timeout_s timeout_secs",
    "timeout_s": "timeout timeout_secs",
    "host_memory_bytes": "memory_bytes max_memory buffer_bytes memory_limit bytes_per_second",
    "endpoint": "endpoint_url s3_endpoint",
    "durability": "fsync sync sync_files durable",
    "safe_globals": "allowed_globals add_safe_globals allowlist",
    "rules": "rename renames mapping map key_mapping transforms",
    "dry_run": "dryrun simulate",
    "progress": "callback progress_callback show_progress",
    "metrics": "metric score",
    "fallback": "skip_damaged",
    "trainable_only": "only_trainable trainable adapter_only lora_only save_trainable_only",
    "merge_lora": "lora adapter adapter_path lora_path merge_adapter peft merge",
}
_OF_MANAGER = ("keep_last", "keep_every", "keep_best", "save_every", "save_every_s")
_SENTENCES: Mapping[str, str] = {
    "async_save": "dcpx.async_save saves in the background",
    "device": "values go into the tensors of the state; load_tensors(device=) makes new ones",
    "overwrite": "storage_writer=DcpxWriter(path, overwrite=False) refuses a path that is taken",
    "rules": "rules have no keyword: key_map=KeyMap((pattern, replacement), ...)",
    "weights_only": "no load executes what it reads; ReadOptions(safe_globals=) allows a class",
}


_T = TypeVar("_T")
_PLAIN = ("torch_dcpx", "builtins", "typing", "collections", "abc")  # modules of ours, and of bases
_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def telling(value: _T, name: str = "") -> _T:
    """Returns a function that tells what was meant; changes a class so that its calls do."""
    name = name or getattr(value, "__qualname__", "")
    if inspect.isfunction(value):
        return _wrapped(value, name)  # type: ignore[return-value]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        new = vars(value).get("__new__")
        if isinstance(new, staticmethod):  # of a named tuple
            value.__new__ = staticmethod(_wrapped(new.__func__, name))  # type: ignore[method-assign]
        others = [base for base in value.__mro__[1:] if not base.__module__.startswith(_PLAIN)]
        for method, function in list(vars(value).items()):
            # What other libraries call by a name of theirs is compared with theirs.
            is_public = not (method[0] == "_" or any(hasattr(base, method) for base in others))
            if inspect.isfunction(function) and (is_public or method == "__init__"):
                called = name if method == "__init__" else f"{name}.{method}"
                setattr(value, method, _wrapped(function, called))
    return value


def _wrapped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    code = function.__code__
    takes_any = code.co_flags & inspect.CO_VARKEYWORDS
    arguments = code.co_argcount + code.co_kwonlyargcount - ("." in name)  # without self
    if getattr(function, "tells_keywords", False) or not (arguments > 0 or takes_any):
        return function  # or has none that can be meant

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        try:
            return function(*args, **given)
        except TypeError as error:
            if given:
                _tell(error, function, name, args, given)
            raise

    call.tells_keywords = True  # type: ignore[attr-defined]
    return call


def _tell(
    error: TypeError, function: Callable[..., Any], name: str, args: Any, given: Iterable[str]
) -> None:
    """Changes the text of an error if the call has no such keyword, and so has not begun."""
    parameters, takes_any = _parameters(function, args)
    unknown = [one for one in given if one not in parameters]
    if takes_any:
        unknown = [one for one in unknown if f"unexpected keyword argument {one!r}" in str(error)]
    if unknown:
        texts = [f"{word!r}{_hint(word, parameters)}" for word in unknown]
        nouns = "an unexpected keyword argument" if len(texts) == 1 else "unexpected keywords"
        if name[0] == "_" and args:  # of a base that has no name outside
            name = name.replace(name.partition(".")[0], type(args[0]).__name__)
        error.args = (f"{name}() got {nouns} {'; '.join(texts)}",)


def _parameters(
    function: Callable[..., Any], args: Sequence[Any]
) -> tuple[dict[str, inspect.Parameter], bool]:
    """Returns what a call takes, an `__init__` with what bases do, and whether it takes any."""
    calls = [function]
    if function.__name__ == "__init__" and args:
        inits = [vars(cls).get("__init__") for cls in type(args[0]).__mro__]
        plain = [getattr(init, "__wrapped__", init) for init in inits]
        calls = [init for init in plain[plain.index(function) :] if inspect.isfunction(init)]
    found: dict[str, inspect.Parameter] = {}
    for one in calls:
        own = inspect.signature(one).parameters
        kinds = {parameter.kind for parameter in own.values()}
        found = {**own, **found}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return {name: one for name, one in found.items() if one.kind not in _MORE}, takes_any


def _hint(word: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """Returns what a keyword may have meant, or what the call takes."""
    taken = [one for one in parameters if one != "self" and not one.startswith("_")]
    meant = [word, *(own for own, others in _OTHERS.items() if word.lower() in others.split())]
    for one in (*meant, *_OTHERS.get(word, "").split()):  # also ours where another name is taken
        if one in taken:
            return f"; did you mean {one!r}?"
    fields = dict(_options_of(parameters))
    for one in meant:
        if one in fields:
            return f"; write {fields[one]}{one}=...)"
        if one in _OF_MANAGER:
            return f"; CheckpointManager(root, {one}=...) takes it"
        if one in _SENTENCES:
            return f"; {_SENTENCES[one]}"
    if near := difflib.get_close_matches(word, taken, 1, 0.7):
        return f"; did you mean {near[0]!r}?"
    if near := difflib.get_close_matches(word, list(fields), 1, 0.8):
        return f"; did you mean {fields[near[0]]}{near[0]}=...)?"
    return f"; it takes {', '.join(taken)}"


def _options_of(parameters: Mapping[str, inspect.Parameter]) -> Iterable[tuple[str, str]]:
    """Yields the fields of options that a call takes, and how a call with one begins."""
    for name, one in parameters.items():
        for cls in (WriteOptions, ReadOptions):
            if cls.__name__ in str(one.annotation):
                for field in inspect.signature(cls).parameters:
                    yield field, f"{name}={cls.__name__}("
