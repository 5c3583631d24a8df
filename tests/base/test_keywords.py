"""Mistyped keywords: each public call says which one was meant, or what has it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torch_dcpx as dcpx
from torch_dcpx import CheckpointManager, ReadOptions, WriteOptions
from torch_dcpx._keywords import telling

CALLS = {
    name: value
    for name in dcpx.__all__
    if callable(value := getattr(dcpx, name))
    and not (isinstance(value, type) and issubclass(value, BaseException))
}

TYPOS: list[tuple[Any, str, str]] = [
    (CheckpointManager.save, "scheduler", "'lr_scheduler'"),
    (CheckpointManager.save, "optim", "'optimizer'"),
    (CheckpointManager.save, "train_loader", "'dataloader'"),
    (CheckpointManager.resume, "step", "'tag'"),
    (CheckpointManager.export, "step", "'tag_or_model'"),
    (CheckpointManager, "max_to_keep", "'keep_last'"),
    (CheckpointManager, "save_total_limit", "'keep_last'"),
    (CheckpointManager, "keep_lats", "'keep_last'"),
    (CheckpointManager, "directory", "'root'"),
    (CheckpointManager, "save_interval_steps", "'save_every'"),
    (CheckpointManager, "durability", "options=WriteOptions(durability=...)"),
    (dcpx.save, "path", "'checkpoint_id'"),
    (dcpx.save, "model", "'state_dict'"),
    (dcpx.save, "num_workers", "options=WriteOptions(workers=...)"),
    (dcpx.save, "keep_last", "CheckpointManager(root, keep_last=...)"),
    (dcpx.save, "async_save", "dcpx.async_save"),
    (dcpx.save, "overwrite", "storage_writer=DcpxWriter(path, overwrite=False)"),
    (dcpx.load, "map_location", "load_tensors(device=)"),
    (dcpx.load, "weights_only", "no load executes"),
    (dcpx.load, "safe_globals", "options=ReadOptions(safe_globals=...)"),
    (dcpx.load, "reader", "'storage_reader'"),
    (dcpx.load_tensors, "names", "'keys'"),
    (dcpx.load_tensors, "map_location", "'device'"),
    (dcpx.load_pretrained, "pretrained_model_name_or_path", "'path'"),
    (dcpx.export, "checkpoint_id", "'path'"),
    (dcpx.export, "max_shard_size", "'max_shard_bytes'"),
    (dcpx.use, "options", "'write_options'"),
    (dcpx.KeyMap, "rename", "key_map=KeyMap((pattern, replacement), ...)"),
    (WriteOptions, "thread_count", "'workers'"),
    (ReadOptions, "timeout", "'load_timeout_s'"),
    (dcpx.SaveReport.trace, "file", "'path'"),
]


def test_a_typo_is_told_what_was_meant() -> None:
    for call, word, hint in TYPOS:
        given = {
            name: None
            for name, one in inspect.signature(call).parameters.items()
            if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
        }
        with pytest.raises(TypeError, match="got an unexpected keyword argument") as caught:
            call(**given, **{word: None})
        assert f"{word!r}; " in str(caught.value) and hint in str(caught.value), (call, word)


def doors() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields each public call and public method of ours, by its name."""
    for name, call in CALLS.items():
        yield name, call
        if isinstance(call, type):
            stock = [base for base in call.__mro__ if base.__module__.startswith("torch.")]
            for method, function in vars(call).items():
                is_ours = not any(hasattr(base, method) for base in stock)
                if inspect.isfunction(function) and method[0] != "_" and is_ours:
                    yield f"{name}.{method}", function


def arguments(call: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [one.name for one in inspect.signature(call).parameters.values() if one.kind in kinds]
    return [name for name in found if name != "self" and name[0] != "_"]


def test_every_public_call_says_what_was_meant_and_what_it_takes() -> None:
    for name, call in doors():
        taken = arguments(call)
        longest = max(taken, key=len, default="")
        meant = {"zzz": ", ".join(taken), f"{longest}s": f"did you mean {longest!r}?"}
        for word, hint in meant.items() if taken else ():
            given: Any = {word: 1}
            with pytest.raises(TypeError) as caught:
                call(None, **given) if "." in name else call(**given)
            start = f"{name}() got an unexpected keyword argument {word!r}; "
            assert str(caught.value).startswith(start) and hint in str(caught.value)


class Framework:
    def __init__(self, total_limit: int = 0, **kwargs: Any) -> None:
        check(**kwargs)

    def save_state(self, folder: str = "") -> None: ...


def check(*, cpu: bool = False) -> None: ...


@telling
class Adapter(Framework):
    def __init__(self, *args: Any, trainable_only: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def wait_for_saves(self, timeout_s: float = 1.0) -> None: ...


def test_an_adapter_knows_what_its_framework_takes() -> None:
    assert Adapter(total_limit=3, cpu=True)
    with pytest.raises(TypeError, match=r"^Adapter\(\) got .* did you mean 'trainable_only'\?$"):
        Adapter(trainable=True)
    for word in ("total_limits", "keep_last"):
        with pytest.raises(TypeError, match=r"did you mean 'total_limit'\?$"):
            Adapter(**{word: True})
    with pytest.raises(TypeError, match=r"^Adapter.wait_for_saves\(\) got .* mean 'timeout_s'\?$"):
        Adapter().wait_for_saves(timeout=True)  # type: ignore[call-arg]
    assert Adapter.save_state is Framework.save_state


def test_several_typos_are_told_at_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError) as caught:
        manager.resume(scheduler=None, step=3)  # type: ignore[call-arg]
    assert "'lr_scheduler'" in str(caught.value) and "'tag'" in str(caught.value)


def test_errors_of_what_is_called_are_left_alone(tmp_path: Path) -> None:
    def failing(_: Any) -> None:
        raise TypeError("own() got an unexpected keyword argument 'scheduler'")

    state = {"w": torch.ones(2)}
    dcpx.save(state, tmp_path)
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        dcpx.export(state)  # type: ignore[call-arg]
    assert "did you mean" not in str(caught.value)


def test_calls_are_the_same_by_any_name_and_are_pickled() -> None:
    for name in ("save", "load", "export", "use", "load_tensors"):
        call: Callable[..., Any] = getattr(dcpx, name)
        assert pickle.loads(pickle.dumps(call)) is call
        assert call.__doc__ and call.__name__ == name
        assert "args" not in inspect.signature(call).parameters


def test_a_plain_data_loader_is_told_of_the_one_with_a_state(tmp_path: Path) -> None:
    loader: Any = DataLoader([1, 2, 3])  # type: ignore[arg-type]
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(dcpx.OptionError, match="torchdata's StatefulDataLoader"):
            manager.save(1, dataloader=loader)

        class Stateful(DataLoader):  # type: ignore[type-arg]
            def state_dict(self) -> dict[str, Any]:
                return {"at": 3}

            def load_state_dict(self, state: dict[str, Any]) -> None: ...

        manager.save(1, dataloader=Stateful([1]))  # type: ignore[arg-type]
