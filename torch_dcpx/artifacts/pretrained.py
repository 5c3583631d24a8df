"""`dcpx.load_pretrained`: each rank loads its own shards of a model that may be on `meta`.

1. It refuses buffers on `meta` that no file holds.
2. Tensors on `meta` get memory: a DTensor for its local shard alone, so no rank holds the model.
3. One load (`checkpoint/load.py`) reads byte ranges of the files straight into them.
4. The module gets values that its `state_dict()` copied, and is checked (`handed_state`).
5. Forgiven names that are not stored go back to `meta`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_dcpx._arguments import check_options
from torch_dcpx._text import counted, some
from torch_dcpx.artifacts.handed_state import HandedState
from torch_dcpx.checkpoint.load import LoadRun
from torch_dcpx.checkpoint.load_checks import LoadRules
from torch_dcpx.checkpoint.load_plan import RankLoad
from torch_dcpx.checkpoint.stateful import EXTRA_STATE
from torch_dcpx.errors import UnsupportedError, must_be
from torch_dcpx.events import begun
from torch_dcpx.keys.key_map import KeyMap, checked_map
from torch_dcpx.options import ReadOptions
from torch_dcpx.planners.load_planner import DcpxLoadPlanner
from torch_dcpx.ranks.call_id import CallId, last_component
from torch_dcpx.ranks.members import exchange_for
from torch_dcpx.reader.pretrained_reader import PretrainedReader
from torch_dcpx.reports import LoadReport
from torch_dcpx.storage.paths import checked_location
from torch_dcpx.storage.reader_lock import being_read


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    allow_missing: Iterable[str] = (),
    cast: Literal["error", "allow"] = "error",
    device: torch.device | str | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    options: ReadOptions | None = None,
) -> LoadReport:
    """Loads weights into `model`, whose parameters may still be on `meta`.

    All ranks of the group make the same call, but for the model's shards. Of a checkpoint with
    parts (a dict with "model" was saved) it loads the model's.

    Args:
        model: a module, parallelised or not. Its parameters and buffers are filled in place; those
            on `meta` get memory first, and are on `meta` again after an error. If `state_dict()`
            gives copies (FSDP1, hooks), `load_state_dict` gets the loaded values, and
            `state_dict()` is compared with them.
        path: a checkpoint; a file of safetensors, or of torch.save (`*.pt`, `*.pth`, `*.bin`); an
            index of safetensors (`*.index.json`); or a directory with `.metadata`,
            `model.safetensors.index.json`, `model.safetensors`, one `*.safetensors` or
            `pytorch_model.bin`.
        key_map: stored names and shapes to the model's. Default `KeyMap()`: names of the plain
            model, as the module itself says what is a wrapper.
        strict: whether names that are not stored are an error. Default True. With False their
            tensors stay as they are, maybe on `meta`; that none is stored is an error even so.
        allow_missing: globs of names that may be missing all the same. Default ().
        cast: "error" (default): stored and wanted dtypes must be equal. "allow": converted.
        device: of tensors on `meta`. Default None: the mesh's device for shards, else the CPU.
        process_group: ranks that load together. Default None: all of them.
        no_dist: loads in this process alone. Default False.
        options: see `ReadOptions`. Of a file of torch.save no class is made but those in
            `safe_globals`, also with `trusted=True`. Such files, and those of safetensors, hold no
            checksums that could be checked.

    Returns:
        The report of this rank. A name is not missing if another name of its parameter is stored.

    Raises:
        UnsupportedError: on `meta`, a buffer that is not persistent, which no file holds, or
            parameters of which `state_dict()` gives copies: make them on their device before. A
            module that gives copies, and does not hold the values that `load_state_dict` gave it.
            An expanded or nested tensor to fill.
        MismatchError, OptionError, PlanError, NotCommittedError, CorruptionError, StorageError,
        RankError, RankLostError, StoreLostError: as `dcpx.load`.
    """
    began = time.perf_counter()
    weights = _Weights(model, device)
    target: dict[str, Any] = {}

    def prepared() -> RankLoad:
        # `state_dict` may be collective: before any error of one rank alone.
        twins = weights.materialise()
        target.update(model.state_dict())
        run.handed = handed = HandedState(model, target, is_strict=strict)
        twins = {n: group for n, group in twins.items() if handed.copies.keys().isdisjoint(group)}
        check_options("options", options, ReadOptions)
        checked_location(path, "mount it, and name the directory")
        rules = LoadRules.of(strict, allow_missing, cast, "load_pretrained")
        rules = rules._replace(may_miss=_or_extra_state(rules.may_miss), must_find=True)
        names = checked_map(key_map) or KeyMap()
        reader, planner = PretrainedReader(path, options=own_options), DcpxLoadPlanner()
        return RankLoad(
            reader, planner, rules, names, model=model, twins=twins, is_handed=handed.is_needed
        )

    call = CallId("load_pretrained", last_component(path))
    timeout_s = ReadOptions.load_timeout_s
    operation = begun("dcpx.load_pretrained", path)
    try:
        with exchange_for(process_group, no_dist, timeout_s, "load", call) as exchange:
            _check_module(model, path)
            _check_device(device)
            # Wrong ones are refused when all ranks have called `state_dict`.
            own_options = options if isinstance(options, ReadOptions) else ReadOptions()
            exchange.restart(own_options.load_timeout_s)
            exchange.agree_on(strict=strict, cast=cast, node_local=own_options.node_local)
            if own_options.node_local:
                exchange.leave_out_target()
            run = _PretrainedRun(exchange, target, began)
            with being_read(path):
                error = run.run(prepared)
        report = run.ended(error)
    except BaseException as failure:
        weights.put_back()
        operation.failed(failure)
        raise
    weights.put_back(report.missing)
    operation.loaded(report, report.read)
    return report


def _check_module(model: Any, path: Any) -> None:
    if not isinstance(model, nn.Module):
        is_swapped = isinstance(path, nn.Module)
        way = "; model and path are swapped: load_pretrained(model, path)" if is_swapped else ""
        raise must_be("model", model, "a torch.nn.Module", way)


def _check_device(device: Any) -> None:
    """Raises OptionError unless torch knows the device."""
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            wanted = "a device, such as 'cpu' or 'cuda:0'"
            raise must_be("device", device, wanted) from error


class _PretrainedRun(LoadRun):
    """A load that hands the state to the module, if any rank's module needs that."""

    handed: HandedState

    def _apply_parts(self) -> Sequence[Callable[[], None]]:
        missing = frozenset(self.own.differences.missing)

        def hand_over() -> None:
            self._apply_own()
            self.handed.hand_over(missing)

        # Two steps: `state_dict` may be collective, so all ranks call it or none does.
        return hand_over, lambda: self.handed.check(missing)


class _Weights:
    """The tensors of a model that are on `meta`, while a load fills it."""

    def __init__(self, model: nn.Module, device: torch.device | str | None) -> None:
        self._model = model
        self._device = device
        self._names: frozenset[str] = frozenset()  # of tensors that were on meta

    def materialise(self) -> dict[str, set[str]]:
        """Gives memory to tensors on `meta`.

        Returns:
            By name, all names of the same tensor, if there are several.

        Raises:
            UnsupportedError: no file holds a buffer on `meta`.
        """
        _refuse_transient(self._model)
        state = _tensors_of(self._model)
        groups: dict[int, set[str]] = {}
        for name, tensor in state.items():
            groups.setdefault(id(tensor), set()).add(name)
        twins = {name: group for group in groups.values() if len(group) > 1 for name in group}
        self._names = frozenset(name for name, tensor in state.items() if tensor.is_meta)
        if self._names:
            self._replace(state, self._names, self._empty)
        return twins

    def put_back(self, names: Collection[str] | None = None) -> None:
        """Puts tensors back on `meta`: those of `names`, or all."""
        back = self._names if names is None else self._names.intersection(names)
        if back:
            self._replace(
                _tensors_of(self._model), back, lambda one: torch.empty_like(one, device="meta")
            )

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._device
        if device is None:
            device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
        return torch.empty_like(tensor, device=device)

    def _replace(
        self,
        state: Mapping[str, torch.Tensor],
        names: Collection[str],
        make: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Replaces tensors, so that places that share one share the new one.

        Source: torch.nn.Module.to_empty, which takes shared parameters apart.
        """
        chosen = {id(state[name]) for name in names}
        before = dict(_places_of(self._model))
        apply: Any = self._model._apply
        apply(lambda one: make(one) if id(one) in chosen else one)
        new: dict[int, Any] = {}
        for (module, kind, key), old in before.items():
            if id(old) in chosen:
                slots = getattr(module, kind)
                slots[key] = new.setdefault(id(old), slots[key])


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and persistent buffers, by the names of the state."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _places_of(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str, str], torch.Tensor]]:
    """Yields ((module, its dict, key), tensor) of each place of a tensor."""
    for module in model.modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    yield (module, kind, key), tensor


def _refuse_transient(model: nn.Module) -> None:
    """Raises UnsupportedError for buffers on `meta` that no state holds."""
    names = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers.get(key)) is not None and buffer.is_meta
    ]
    if names:
        raise UnsupportedError(
            f"{counted(len(names), 'buffer')} on meta {'is' if len(names) == 1 else 'are'} not "
            f"persistent, so no file holds {'it' if len(names) == 1 else 'them'}: {some(names)}; "
            "make them on their device before load_pretrained"
        )


def _or_extra_state(may_miss: Callable[[str], object]) -> Callable[[str], object]:
    """Returns `may_miss`, widened to a module's extra state; of a dict, to each of its values."""
    return lambda name: EXTRA_STATE in name.split(".") or may_miss(name)
