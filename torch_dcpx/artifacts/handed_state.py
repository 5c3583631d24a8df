"""Hands over, after a load, and checks what of a `state_dict()` is not the module's memory.

A load fills what `state_dict()` gave. For most modules that is the memory of their parameters and
buffers. FSDP1, hooks, overridden methods and quantised modules give copies, casts, or what they
make on the fly: filled, and forgotten, unless `load_state_dict` gets them.

1. Before the load: which names are no memory of a parameter or buffer. Nothing else is done for
   modules that have none.
2. After it: `load_state_dict`, on every rank where any rank has such names: it may be collective.
3. Then `state_dict()` once more, which must give what was loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torch_dcpx.errors import UnsupportedError
from torch_dcpx.tensors.memory import refuse_expanded

EXTRA_STATE = "_extra_state"
_MAX_SHOWN = 5

_Memory = dict[tuple[str, int], list[tuple[int, int]]]  # by device and storage: first byte, end


class HandedState:
    """A module's state, and the names in it that only `load_state_dict` brings into the module."""

    def __init__(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Looks through what `module.state_dict()` has just given.

        Raises:
            UnsupportedError: there are copies of what is on meta, which have no bytes to fill.
        """
        self._module = module
        self._state = state
        memory = _memory_of(module)
        self.copies = frozenset(
            name for name, value in state.items() if not _is_memory(value, memory)
        )
        on_meta = [
            name
            for name, value in state.items()
            if name in self.copies and any(one.is_meta for one in _tensors_in(value))
        ]
        if on_meta:
            raise UnsupportedError(
                f"{_named(module)} gives copies of what is on meta: {_listed(on_meta)}; give it "
                "memory before, by module.to_empty(device=...)"
            )

    def is_needed(self, missing: Collection[str]) -> bool:
        """Returns whether anything was loaded that the module does not hold by itself."""
        unloaded = self._unloaded(missing)
        return any(name not in unloaded for name in self._handed())

    def check_memory(self, missing: Collection[str]) -> None:
        """Raises UnsupportedError where several elements of what is loaded have one memory.

        Args:
            missing: flattened names that will not be loaded.
        """
        unloaded = self._unloaded(missing)
        for name, value in self._state.items():
            for tensor in _tensors_in(value) if name not in unloaded else ():
                refuse_expanded(name, tensor)

    def hand_over(self, missing: Collection[str], *, strict: bool) -> None:
        """Gives the module what was loaded: extra states alone where all else is its memory.

        Args:
            missing: flattened names that were not loaded; they stay as they are.
            strict: what `load_state_dict` is told, unless names are missing.

        Raises:
            Whatever `load_state_dict` does.
        """
        is_extra_alone = self.is_needed(missing) and not self._copied(missing)
        names = self._handed() if is_extra_alone else self._state
        unloaded = self._unloaded(missing)
        given = {name: self._state[name] for name in names if name not in unloaded}
        is_strict = strict and len(given) == len(self._state)
        self._module.load_state_dict(given, strict=is_strict)

    def check(self, missing: Collection[str]) -> None:
        """Asks the module for its state again.

        Raises:
            UnsupportedError: it does not hold what was handed over.
        """
        state: Mapping[str, Any] = self._module.state_dict()
        copied = self._copied(missing)
        lost = [name for name in copied if not _is_equal(self._state[name], state.get(name))]
        if lost:
            raise UnsupportedError(
                f"{_named(self._module)} gives copies of its weights, and after load_state_dict() "
                f"it does not hold what was loaded for {len(lost)} of them: {_listed(lost)}; load "
                "into a dict by dcpx.load, and hand that over in the way the module wants"
            )

    def _handed(self) -> Iterator[str]:
        return (name for name in self._state if name in self.copies or _is_extra(name))

    def _unloaded(self, missing: Collection[str]) -> frozenset[str]:
        """Returns the names of the state beneath which nothing is loaded: of a dict or a list, a
        load misses the values one by one.
        """
        unloaded = frozenset(missing)
        for name, value in self._state.items():
            if isinstance(value, (Mapping, list, tuple)) and unloaded:
                flat = flatten_state_dict({name: value})[0]
                if flat and unloaded.issuperset(flat):
                    unloaded |= {name}
        return unloaded

    def _copied(self, missing: Collection[str]) -> list[str]:
        unloaded = self._unloaded(missing)
        return [
            name
            for name in self._state
            if name in self.copies and name not in unloaded and not _is_extra(name)
        ]


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == EXTRA_STATE


def _memory_of(module: nn.Module) -> _Memory:
    """Returns where the parameters and buffers of a module lie."""
    memory: _Memory = {}
    for values in (module.parameters(), module.buffers()):
        for value in values:
            for tensor in _plain(value):
                key, begin, end = _place(tensor)
                memory.setdefault(key, []).append((begin, end))
    return memory


def _is_memory(value: Any, memory: _Memory) -> bool:
    """Returns whether to fill a value of a state is to fill parameters and buffers."""
    return all(
        isinstance(leaf, torch.Tensor) and all(_is_held(tensor, memory) for tensor in _plain(leaf))
        for leaf in _leaves(value)
    )


def _is_held(tensor: torch.Tensor, memory: _Memory) -> bool:
    key, begin, end = _place(tensor)
    return tensor.numel() == 0 or any(
        low <= begin and end <= high for low, high in memory.get(key, ())
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yields what is in dicts and lists, as planners take them apart."""
    if isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(one)
    else:
        yield value


def _place(tensor: torch.Tensor) -> tuple[tuple[str, int], int, int]:
    """Returns the storage of a tensor, and the first byte and the end of what it has of it."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return ("", id(tensor)), 0, 1
    storage = tensor.untyped_storage()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    end = begin + (last + 1) * tensor.element_size()
    # Of several on meta none has an address; the storage itself tells them apart.
    return (str(tensor.device), storage._cdata), int(begin), int(end)


def _plain(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors that have a tensor's bytes, on this rank."""
    if is_lazy(value):
        return
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield from _plain(shard.tensor)
    elif isinstance(value, DTensor):
        yield from _plain(value._local_tensor)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    else:
        yield value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))
    return [tensor for leaf in leaves for tensor in _plain(leaf)]


def _is_equal(loaded: Any, held: Any) -> bool:
    """Returns whether the tensors have the same bits. Objects are believed."""
    mine, its = _tensors_in(loaded), _tensors_in(held)
    return len(mine) == len(its) and all(
        a.shape == b.shape and a.dtype == b.dtype and _has_equal_bits(a, b)
        for a, b in zip(mine, its, strict=True)
    )


def _has_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided or one.is_quantized:
        return torch.equal(one, other)
    bits = [
        value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for value in (one, other)
    ]
    return torch.equal(bits[0], bits[1])


def _named(module: nn.Module) -> str:
    return f"state_dict() of {type(module).__name__}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(map(repr, names[:_MAX_SHOWN])) + more
