"""A state dict with its tensors replaced by staged ones, for DCP to save.

Containers keep their kind, DTensors and ShardedTensors their wrapper; other values are deep-copied,
as by stock's stagers. The whole goes to another process as one descriptor and a table: torch itself
sends a descriptor, or a file, for each tensor.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from multiprocessing import reduction
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import _infer_sharding_spec_from_shards_metadata
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from torch_dcpx._compat import CHUNK_ATTRIBUTES, from_dlpack, with_local_tensor
from torch_dcpx._native import _C
from torch_dcpx.errors import UnsupportedError
from torch_dcpx.staging.arena import attach, has_arenas, note_written
from torch_dcpx.tensors import device as device_memory
from torch_dcpx.tensors.memory import PLAIN_CLASSES, is_plain

_COPIED_KINDS = frozenset((*PLAIN_CLASSES, AsyncCollectiveTensor))
_ATOMIC_CLASSES = frozenset((int, float, bool, complex, str, bytes, type(None)))
_DICT_METHODS = ("__getitem__", "__iter__", "items", "keys", "values")


class StagedState(dict[str, Any]):
    """A staged state dict. Sent through a pipe of multiprocessing it maps the same memory there."""

    arena: _C.Arena | None = None


class StateWalk:
    """Takes a state apart into its tensors and builds the same of others."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []  # plain ones, and local ones of wrappers
        self._prefixes: dict[int, str] = {}  # by the id of a container
        self._slots: list[tuple[Any, Any]] = []  # (container, key) of each tensor
        self._late: list[Callable[[], None]] = []  # they build objects of staged tensors
        self._memo: dict[int, Any] = {}  # the staged object, by the id of the original
        self._seen: dict[int, Any] = {}  # originals by id, staged now or late
        self._state = StagedState()
        self._fill(self._state, state_dict, "")

    def rebuild(self, staged: list[torch.Tensor]) -> StagedState:
        """Returns the state with `staged` in the place of `tensors`. Once only."""
        for (container, key), tensor in zip(self._slots, staged, strict=True):
            container[key] = tensor
        if self._late:  # an object may refer to tensors that are staged
            self._memo.update(zip(map(id, self.tensors), staged, strict=True))
        for finish in self._late:
            finish()
        # Else a cycle would hold the memory until the garbage collector comes.
        for held in (self._late, self._slots, self._memo, self._seen):
            held.clear()
        state, self._state = self._state, StagedState()
        return state

    def name_of(self, index: int) -> str:
        """Returns the name of a tensor, for errors."""
        container, key = self._slots[index]
        return f"{self._prefixes[id(container)]}{key}"

    def _fill(self, out: dict[Any, Any], values: dict[Any, Any], prefix: str) -> None:
        self._prefixes[id(out)] = prefix
        add_tensor, add_slot = self.tensors.append, self._slots.append
        for key, value in values.items():
            out[key] = None  # in the order of the original
            if type(value) in _COPIED_KINDS and not value.__dict__:
                add_tensor(value)
                add_slot((out, key))
            else:
                self._put(out, key, value, f"{prefix}{key}")

    def _put(self, out: Any, key: Any, value: Any, name: str) -> None:
        """Puts the staged `value` into `out[key]`, now or once the tensors are there."""
        if type(value) in _ATOMIC_CLASSES:
            out[key] = value
        elif id(value) in self._seen:
            self._late.append(lambda: out.__setitem__(key, self._memo[id(value)]))
        elif _is_in_memory(value):
            local = self._tensors([value], name)
            self._finish(out, key, value, lambda: _with_chunks(local[0], value))
        elif isinstance(value, DTensor):
            local = self._tensors([value._local_tensor], name)
            self._finish(out, key, value, lambda: with_local_tensor(value, local[0]))
        elif isinstance(value, ShardedTensor):
            local = self._tensors([shard.tensor for shard in value.local_shards()], name)
            self._finish(out, key, value, lambda: _sharded_like(value, local))
        elif isinstance(value, dict):
            staged = _empty_like(value)
            self._keep(value, staged)
            out[key] = staged
            self._fill(staged, value, f"{name}.")
        elif type(value) is list:
            items: list[Any] = [None] * len(value)
            self._keep(value, items)
            out[key] = items
            self._put_all(items, value, name)
        elif isinstance(value, tuple):
            items = [None] * len(value)
            self._put_all(items, value, name)
            self._finish(out, key, value, lambda: _tuple_like(value, items))
        else:
            self._finish(out, key, value, lambda: _copied(value, name, self._memo))

    def _put_all(self, out: list[Any], values: Iterable[Any], name: str) -> None:
        for i, value in enumerate(values):
            self._put(out, i, value, f"{name}.{i}")

    def _tensors(self, values: list[torch.Tensor], name: str) -> list[Any]:
        """Returns a list that will hold the tensors staged for `values`."""
        staged: list[Any] = [None] * len(values)
        self._prefixes[id(staged)] = f"{name}, part "
        self.tensors += values
        self._slots += [(staged, i) for i in range(len(values))]
        return staged

    def _keep(self, value: Any, staged: Any) -> None:
        """Notes the staged `value`, for other places that refer to it."""
        self._memo[id(value)] = staged
        self._seen[id(value)] = value

    def _finish(self, out: Any, key: Any, value: Any, make: Callable[[], Any]) -> None:
        self._seen[id(value)] = value

        def finish() -> None:
            self._memo[id(value)] = out[key] = make()

        self._late.append(finish)


def _empty_like(value: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a dict of the same class to fill; a plain one where the class overrides look-ups."""
    cls = type(value)
    if cls is dict or any(getattr(cls, name) is not getattr(dict, name) for name in _DICT_METHODS):
        return OrderedDict() if isinstance(value, OrderedDict) else {}
    try:
        staged = copy.copy(value)
        staged.clear()
    except TypeError:  # a class that is made with arguments of its own
        return {}
    return staged


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if all(a is b for a, b in zip(value, items, strict=True)):
        return value
    make: Callable[[list[Any]], tuple[Any, ...]] = getattr(value, "_make", tuple)
    return make(items)


def _is_in_memory(value: Any) -> bool:
    """Returns whether a plain tensor holds all of `value` that is saved: of a Parameter neither the
    class nor its attributes (hooks, loaders, gradients) are.
    """
    return type(value) in _COPIED_KINDS or (
        isinstance(value, torch.nn.Parameter) and not torch.nn.parameter.is_lazy(value)
    )


def _sharded_like(value: ShardedTensor, local: list[torch.Tensor]) -> ShardedTensor:
    """Returns `value` with other local shards, all placed on the host.

    Not by torch's own constructors: they refuse page-locked shards, such as an arena's.
    """
    placed = {id(one): _on_host(one) for one in value.metadata().shards_metadata}
    own = [placed.get(id(s.metadata)) or _on_host(s.metadata) for s in value.local_shards()]
    properties = value.metadata().tensor_properties
    infer: Any = _infer_sharding_spec_from_shards_metadata
    staged: ShardedTensor = ShardedTensor.__new__(
        ShardedTensor,
        infer(list(placed.values())),
        value.metadata().size,
        dtype=properties.dtype,
        layout=properties.layout,
        pin_memory=properties.pin_memory,
        requires_grad=properties.requires_grad,
    )
    staged._local_shards = [Shard(*pair) for pair in zip(local, own, strict=True)]
    staged._prepare_init(process_group=value._process_group)  # type: ignore[no-untyped-call]
    staged._post_init()  # type: ignore[no-untyped-call]
    return staged


def _on_host(metadata: ShardMetadata) -> ShardMetadata:
    """Returns a copy that places the shard on the host of its rank."""
    metadata = copy.deepcopy(metadata)
    if isinstance(metadata.placement, _remote_device):
        metadata.placement._device = torch.device("cpu")
    return metadata


class _CopiesOnHost(TorchFunctionMode):
    """Lets `copy.deepcopy` put tensors of devices, inside of objects, on the host.

    A copy on the device would take its memory, and the thread that saves does not know the stream
    on which the copy is made.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        if device_memory.is_host(tensor) or tensor.is_meta:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.clone:  # by a class's own copy, as Parameter's
            return tensor.detach().cpu()
        memo = args[1]
        if id(tensor) not in memo:
            made = tensor.detach().cpu()
            made.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
            memo[id(tensor)] = made
        return memo[id(tensor)]


def _with_chunks(staged: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns `staged` with the attributes by which `value` names the tensor of its chunks."""
    for name in CHUNK_ATTRIBUTES:
        if name in value.__dict__:
            setattr(staged, name, copy.deepcopy(value.__dict__[name]))
    return staged


def _copied(value: Any, name: str, memo: dict[int, Any]) -> Any:
    """Returns a deep copy, also of tensors of other classes. UnsupportedError: there is none."""
    try:
        with torch.no_grad(), _CopiesOnHost():
            return copy.deepcopy(value, memo)
    except Exception as error:  # anything: the class's own code ran
        if isinstance(value, torch.Tensor):  # not a leaf of autograd's graph, or no copy of its own
            with contextlib.suppress(NotImplementedError, RuntimeError, TypeError), torch.no_grad():
                made = value.detach()
                made = made.clone() if device_memory.is_host(made) else made.cpu()
                made.__dict__.update(copy.deepcopy(value.__dict__, memo))
                return made
        raise UnsupportedError(
            f"'{name}' cannot be staged: a copy of its {type(value).__name__} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def note_state_written(state: object) -> None:
    """Tells the stager of `state` that a save has written it: its memory may soon be free."""
    if not isinstance(state, dict) or not has_arenas():
        return
    for value in list(state.values()):
        tensor = value._local_tensor if isinstance(value, DTensor) else value
        if type(tensor) in _COPIED_KINDS and tensor.is_cpu and is_plain(tensor) and tensor.numel():
            note_written(tensor.data_ptr())
            return


# ---- To another process -------------------------------------------------------------------------


class _Pickler(reduction.ForkingPickler):
    """Writes the place of each tensor that lies in the arena; all else as torch does."""

    def __init__(self, file: io.BytesIO, arena: _C.Arena) -> None:
        super().__init__(file)
        self._begin, self._end = arena.address, arena.address + arena.nbytes

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not obj.is_cpu or obj.layout != torch.strided:
            return None
        address, nbytes = obj.data_ptr(), obj.nbytes
        if not self._begin <= address < self._end or obj.untyped_storage().nbytes() != nbytes:
            return None
        return (address - self._begin, nbytes, obj.dtype, tuple(obj.shape), obj.stride())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arena: _C.Arena) -> None:
        super().__init__(file)
        self._arena = arena

    def persistent_load(self, pid: Any) -> torch.Tensor:
        offset, nbytes, dtype, shape, strides = pid
        raw = from_dlpack(self._arena.lend(offset, nbytes))
        return raw.view(dtype).as_strided(shape, strides)


def _reduce(state: StagedState) -> tuple[Any, ...]:
    arena = state.arena
    if arena is None or arena.fd < 0:
        return dict, (dict(state),)
    file = io.BytesIO()
    _Pickler(file, arena).dump(dict(state))
    return _rebuild, (reduction.DupFd(arena.fd), arena.nbytes, file.getvalue())


def _rebuild(descriptor: Any, nbytes: int, pickled: bytes) -> dict[str, Any]:
    fd = descriptor.detach()
    try:
        arena = attach(fd, nbytes)
    finally:
        os.close(fd)
    state: dict[str, Any] = _Unpickler(io.BytesIO(pickled), arena).load()
    return state


reduction.ForkingPickler.register(StagedState, _reduce)
