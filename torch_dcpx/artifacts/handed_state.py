"""Hands loaded values over to a module whose `state_dict()` gives copies, and checks them.

Most modules' `state_dict()` gives the memory of their parameters and buffers. FSDP1, hooks,
overridden methods and quantised modules give copies or casts: a load fills them in vain, unless
`load_state_dict` gets them.

1. Before the load: find the names that are copies. A module without them needs no more.
2. After it: `load_state_dict`, on all ranks if any rank has copies: it may be collective.
3. Then `state_dict()` again: it must give the loaded values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from torch_dcpx._text import some
from torch_dcpx.checkpoint.stateful import is_extra_state
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.tensors.memory import refuse_expanded

_Memory = dict[tuple[str, int], list[tuple[int, int]]]  # by device and storage: first byte, end


class HandedState:
    """A module's state, and its `copies`: values that only `load_state_dict` brings to the module.

    Methods take `missing`, the flattened names that the load leaves as they are.
    """

    def __init__(self, module: nn.Module, state: dict[str, Any], *, is_strict: bool) -> None:
        """Finds the copies in `state`, a fresh `module.state_dict()`.

        Args:
            is_strict: `strict` of `load_state_dict`, where it gets the whole state.

        Raises:
            UnsupportedError: copies of tensors on meta, which have no bytes to fill.
        """
        self._module = module
        self._state = state
        self._is_strict = is_strict
        memory = _memory_of(module)
        self.copies = {name: one for name, one in state.items() if not _is_memory(one, memory)}
        on_meta = [
            name
            for name, value in self.copies.items()
            if any(tensor.is_meta for tensor in _tensors_in(value))
        ]
        if on_meta:
            raise UnsupportedError(
                f"{_named(module)} gives copies of what is on meta: {some(on_meta)}; give it "
                "memory before, by module.to_empty(device=...)"
            )

    def is_needed(self, missing: Collection[str]) -> bool:
        """Returns whether any value to load is a copy or an extra state.

        Raises:
            UnsupportedError: several elements of a tensor to load have one memory.
        """
        loaded = self._loaded(missing)
        for name, value in loaded.items():
            for tensor in _tensors_in(value):
                refuse_expanded(name, tensor)
        return any(name in self.copies or is_extra_state(name) for name in loaded)

    def hand_over(self, missing: Collection[str]) -> None:
        """Gives the module the loaded values, or its extra states alone if no value is a copy.

        Raises: as `load_state_dict`.
        """
        loaded = self._loaded(missing)
        extras = {name: value for name, value in loaded.items() if is_extra_state(name)}
        given = extras if extras and not self._copied(loaded) else loaded
        is_strict = self._is_strict and len(given) == len(self._state)
        self._module.load_state_dict(given, strict=is_strict)

    def check(self, missing: Collection[str]) -> None:
        """Raises UnsupportedError unless the module's new `state_dict()` has the loaded copies."""
        state: Mapping[str, Any] = self._module.state_dict()
        copied = self._copied(self._loaded(missing))
        lost = [name for name in copied if not _is_equal(self._state[name], state.get(name))]
        if lost:
            raise UnsupportedError(
                f"{_named(self._module)} gives copies of its weights, and after load_state_dict() "
                f"it does not hold what was loaded for {len(lost)} of them: {some(lost)}; load "
                "into a dict by dcpx.load, and hand that over in the way the module wants"
            )

    def _loaded(self, missing: Collection[str]) -> dict[str, Any]:
        """Returns the state without `missing`, and without dicts and lists of missing values."""
        unloaded = frozenset(missing)
        for name, value in self._state.items():
            if isinstance(value, (Mapping, list, tuple)) and unloaded:
                flat = flatten_state_dict({name: value})[0]
                if flat and unloaded.issuperset(flat):
                    unloaded |= {name}
        return {name: value for name, value in self._state.items() if name not in unloaded}

    def _copied(self, loaded: Iterable[str]) -> list[str]:
        return [name for name in loaded if name in self.copies and not is_extra_state(name)]


def _memory_of(module: nn.Module) -> _Memory:
    """Returns the memory of a module's parameters and buffers."""
    memory: _Memory = {}
    for values in (module.parameters(), module.buffers()):
        for value in values:
            for tensor in _plain(value):
                key, begin, end = _place(tensor)
                memory.setdefault(key, []).append((begin, end))
    return memory


def _is_memory(value: Any, memory: _Memory) -> bool:
    """Returns whether all of a value of the state is memory of parameters and buffers."""
    return all(
        isinstance(leaf, torch.Tensor) and all(_is_held(tensor, memory) for tensor in _plain(leaf))
        for leaf in _leaves(value)
    )


def _is_held(tensor: torch.Tensor, memory: _Memory) -> bool:
    if tensor.is_quantized:  # the loaded scale stays with what state_dict() gave
        return False
    key, begin, end = _place(tensor)
    return tensor.numel() == 0 or any(
        low <= begin and end <= high for low, high in memory.get(key, ())
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the values in dicts and lists, as planners flatten them."""
    if isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(one)
    else:
        yield value


def _place(tensor: torch.Tensor) -> tuple[tuple[str, int], int, int]:
    """Returns a tensor's storage, and its first byte and its end in there."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return ("", id(tensor)), 0, 1
    storage = tensor.untyped_storage()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    end = begin + (last + 1) * tensor.element_size()
    # Not by address: storages on meta have none.
    return (str(tensor.device), storage._cdata), int(begin), int(end)


def _plain(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors that hold a tensor's bytes on this rank."""
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
    """Returns whether the tensors have the same bits; objects are not compared."""
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
