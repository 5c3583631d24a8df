"""Tensors and torch's small values, rebuilt with the checks that torch's own rebuilders lack.

torch's `_rebuild_tensor_v2` ends in `set_`, which grows a storage that is too small by bytes nobody
wrote, and its zip reader believes the element count of a storage. Here a view must lie inside its
storage, and a storage inside its record.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_dcpx.unpickle.settle import Settler, check_attributes, never_called, no_more_than, refuse
from torch_dcpx.unpickle.stand_ins import GlobalTable, StandIn, StandInType, brief, stand_in

MAX_INT64 = 2**63 - 1
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
LAYOUTS = {str(value): value for value in vars(torch).values() if type(value) is torch.layout}
_SCHEMES: GlobalTable = {
    ("torch", name): value for name, value in vars(torch).items() if type(value) is torch.qscheme
}
DTYPES: GlobalTable = {
    ("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype
}


# Both are named tuples because those have nothing that BUILD could set.
class StorageKind(NamedTuple):
    """The meaning of `torch.FloatStorage` and its like in a persistent id."""

    dtype: torch.dtype | None  # None: untyped, counted in bytes


class StorageRef(NamedTuple):
    """A checked persistent id: one storage of the item. Read by `Settler.read_storage`."""

    dtype: torch.dtype | None
    key: str  # name of its record
    location: str  # device it was saved from
    nbytes: int


def storage_ref(pid: Any) -> StorageRef:
    """Returns a persistent id, checked; refuses one that torch.save does not write."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        refuse("has a persistent id that is no storage")
    _, kind, key, location, numel = pid
    if type(kind) is not StorageKind or type(key) is not str or type(location) is not str:
        refuse("has a storage of an unknown kind, key or place")
    if type(numel) is not int or not 0 <= numel <= MAX_INT64:
        refuse(f"has a storage of {brief(numel)} elements")
    itemsize = 1 if kind.dtype is None else kind.dtype.itemsize
    return StorageRef(kind.dtype, key, location, numel * itemsize)


def dims(value: Any, what: str) -> tuple[int, ...]:
    """Returns `value` if it is a tuple of ints in [0, 2^63), else refuses it by the name `what`."""
    if type(value) is not tuple and type(value) is not torch.Size:
        refuse(f"has a {what} of type {type(value).__name__}")
    for n in value:
        if type(n) is not int or not 0 <= n <= MAX_INT64:
            refuse(f"has {brief(n)} in a {what}")
    return tuple(value)


def _build_size(raw: StandIn, _settle: Settler) -> torch.Size:
    no_more_than(raw)
    if len(raw.args) != 1:
        refuse("calls torch.Size with other than one tuple")
    return torch.Size(dims(raw.args[0], "size"))


def build_layout(raw: StandIn, _settle: Settler) -> torch.layout:
    """Builds a layout of its exact name."""
    no_more_than(raw)
    name = raw.args[0] if len(raw.args) == 1 else None
    if type(name) is not str or name not in LAYOUTS:
        refuse(f"has the layout {brief(name)}")
    return LAYOUTS[name]


def _device(raw: StandIn, _settle: Settler) -> torch.device:
    no_more_than(raw)
    if list(map(type, raw.args)) not in ([str], [str, int]):
        refuse("calls torch.device with other than a type and an index")
    return torch.device(*raw.args)


def _check_extent(offset: Any, size: Any, stride: Any) -> int:
    """Returns how many elements of a storage a view reaches over."""
    sizes, strides = dims(size, "tensor size"), dims(stride, "tensor stride")
    if len(sizes) != len(strides):
        refuse(f"has a tensor of {len(sizes)} sizes and {len(strides)} strides")
    last: int = dims((offset,), "tensor offset")[0]
    if math.prod(sizes) > MAX_INT64:
        refuse("has a tensor of more than 2^63 elements")
    if 0 in sizes:
        return last
    return last + 1 + sum([(n - 1) * stride for n, stride in zip(sizes, strides, strict=True)])


def _finish(tensor: torch.Tensor, requires_grad: Any, hooks: Any, metadata: Any) -> torch.Tensor:
    if type(requires_grad) is not bool or len(hooks) != 0:
        refuse("has a tensor with hooks, or without a flag for gradients")
    if metadata is not None:
        if type(metadata) is not dict or not set(metadata) <= {"conj", "neg"}:
            refuse("has a tensor with metadata other than conj and neg")
        if any(type(flag) is not bool for flag in metadata.values()):
            refuse("has a tensor with metadata other than flags")
        torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call]
    return tensor.requires_grad_() if requires_grad else tensor


def _tensor(raw: StandIn, settle: Settler) -> torch.Tensor:
    no_more_than(raw)
    ref, offset, sizes, strides, requires_grad, hooks, *metadata = raw.args
    dtype = ref.dtype if type(ref) is StorageRef else None
    if raw.global_name == "torch._utils._rebuild_tensor_v3":  # whose storage is untyped
        dtype, *metadata = metadata
    if type(ref) is not StorageRef or type(dtype) is not torch.dtype or settle.read_storage is None:
        refuse("has a tensor without a storage or a dtype")
    extent_elems, storage = _check_extent(offset, sizes, strides), settle.read_storage(ref)
    held_bytes = min(storage.nbytes(), ref.nbytes)
    if extent_elems * dtype.itemsize > held_bytes:
        refuse(
            f"has a tensor that reaches over {extent_elems} elements of {dtype}; its storage "
            f"{ref.key!r} holds {held_bytes} B"
        )
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, sizes, strides)
    return _finish(tensor, requires_grad, settle(hooks), settle(*metadata) if metadata else None)


def _meta_tensor(raw: StandIn, _settle: Settler) -> torch.Tensor:
    no_more_than(raw)
    dtype, sizes, strides, requires_grad = raw.args
    if type(dtype) is not torch.dtype or _check_extent(0, sizes, strides) > MAX_INT64:
        refuse("has a tensor on the meta device of an impossible size")
    tensor = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return _finish(tensor, requires_grad, (), None)


def _set_attributes(tensor: torch.Tensor, state: Any) -> None:
    """Sets Python attributes, such as the two that make a tensor an `nn.Buffer`."""
    if type(state) is tuple and len(state) == 2 and state[1] in (None, {}):
        state = state[0]
    if type(state) is not dict:
        refuse("has a tensor with a state that is no dict")
    check_attributes(state, "torch.Tensor", type(tensor))
    tensor.__dict__.update(state)


def _parameter(raw: StandIn, settle: Settler) -> torch.nn.Parameter:
    no_more_than(raw)
    data, requires_grad, hooks, *state = settle(raw.args)
    if type(data) is not torch.Tensor or type(requires_grad) is not bool or len(hooks) != 0:
        refuse("has a parameter of other than a tensor and a flag")
    parameter = torch.nn.Parameter(data, requires_grad)
    if state:
        _set_attributes(parameter, *state)
    return parameter


def _tensor_with_attributes(raw: StandIn, settle: Settler) -> torch.Tensor:
    no_more_than(raw)
    rebuild, cls, args, state = raw.args
    known = {TORCH["torch._utils", n] for n in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")}
    if type(rebuild) is not StandInType or rebuild not in known or type(args) is not tuple:
        refuse("rebuilds a tensor by an unknown function")
    if cls is not TORCH["torch", "Tensor"]:
        refuse("rebuilds a tensor of another class than torch.Tensor")
    tensor: torch.Tensor = settle(rebuild(*args))
    _set_attributes(tensor, settle(state))
    return tensor


_BUILDS: dict[tuple[str, str], Callable[[StandIn, Settler], Any]] = {
    ("torch", "Size"): _build_size,
    ("torch", "Tensor"): never_called,
    ("torch", "device"): _device,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_with_attributes,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch.serialization", "_get_layout"): build_layout,
}

TORCH: GlobalTable = {
    **DTYPES,
    **_SCHEMES,
    **{key: stand_in(".".join(key), build) for key, build in _BUILDS.items()},
    **{("torch", name): StorageKind(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): StorageKind(None),
    ("torch", "UntypedStorage"): StorageKind(None),
}
