"""Hand-written hostile pickles, and a watch for what decoding one does to the process."""

from __future__ import annotations

import io
import pickle
import pickletools
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Audit events that decoding must never raise. `pickle.find_class` is raised by CPython's own
# find_class only: it would be a fall-through.
FORBIDDEN = (
    "compile", "ctypes.", "exec", "import", "marshal.", "open", "os.", "pickle.find_class",
    "shutil.", "socket.", "subprocess.", "urllib.",
)  # fmt: skip

_watching = threading.local()
_is_installed = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    seen = getattr(_watching, "seen", None)
    if seen is not None and event.startswith(FORBIDDEN):
        seen.append(f"{event}{args!r:.200}")


@contextmanager
def watched() -> Iterator[None]:
    """Fail when the block raises a forbidden audit event. The hook stays: it cannot be removed."""
    global _is_installed
    if not _is_installed:
        sys.addaudithook(_hook)
        _is_installed = True
    _watching.seen = seen = []
    try:
        yield
    finally:
        _watching.seen = None
        assert seen == []


def name(module: str, attribute: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{attribute}\n".encode()


def stack_name(module: str, attribute: str) -> bytes:
    """STACK_GLOBAL, whose names may hold dots that CPython resolves one by one."""
    return text(module) + text(attribute) + b"\x93"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def value(obj: Any) -> bytes:
    """What pushes a plain object: its pickle of protocol 2 without PROTO, memo and STOP."""
    return pickletools.optimize(pickle.dumps(obj, protocol=2))[2:-1]


def call(function: bytes, *args: bytes) -> bytes:
    """REDUCE."""
    return function + b"(" + b"".join(args) + b"tR"


def new(cls: bytes, *args: bytes) -> bytes:
    """NEWOBJ."""
    return cls + b"(" + b"".join(args) + b"t\x81"


def state(obj: bytes, what: bytes) -> bytes:
    """BUILD."""
    return obj + what + b"b"


def slots(**attributes: Any) -> bytes:
    """A state that makes BUILD call setattr."""
    return b"N" + value(attributes) + b"\x86"


def document(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


SIZE = name("torch", "Size")
NAMESPACE = name("argparse", "Namespace")
ORDERED = name("collections", "OrderedDict")
TENSOR_V2 = name("torch._utils", "_rebuild_tensor_v2")


def _called(module: str, attribute: str, *args: bytes) -> tuple[bytes, str]:
    return call(name(module, attribute), *args), f"{module}.{attribute}"


def _dotted(module: str, attribute: str) -> tuple[bytes, str]:
    return stack_name(module, attribute), f"{module}.{attribute}"


_X, _TOUCH, _SYSTEM = text("x"), text("touch pwned"), name("os", "system")
_METADATA = "torch.distributed.checkpoint.metadata"
_GETATTR = name("builtins", "getattr")
# id -> (pickle, global that must be named): each would run something in a plain unpickler.
REFUSED: dict[str, tuple[bytes, str]] = {
    "os.system": _called("os", "system", _TOUCH),
    "posix.system": _called("posix", "system", _TOUCH),
    "eval": _called("builtins", "eval", text("1/0")),
    "py2 eval": _called("__builtin__", "eval", text("1/0")),
    "exec": _called("builtins", "exec", text("import antigravity")),
    "import": _called("builtins", "__import__", text("this")),
    "open": _called("builtins", "open", text("pwned"), text("w")),
    "getattr": _called("builtins", "getattr", NAMESPACE, text("__init__")),
    "nested getattr": _called(
        "builtins", "getattr", call(_GETATTR, ORDERED, text("__init__")), text("__globals__")
    ),
    "resolve_name": _called("pkgutil", "resolve_name", text("os:system")),
    "partial": (call(call(name("functools", "partial"), _SYSTEM, _X)), "functools.partial"),
    "attrgetter": _called("operator", "attrgetter", text("system")),
    "methodcaller": _called("operator", "methodcaller", text("system"), _X),
    "import_module": _called("importlib", "import_module", text("this")),
    "torch.load": _called("torch", "load", _X),
    "torch.serialization.load": _called("torch.serialization", "load", _X),
    "torch.hub.load": _called("torch.hub", "load", text("x/y"), text("z")),
    "torch.jit.load": _called("torch.jit", "load", _X),
    "torch.jit._script": _called("torch.jit._script", "script", _X),
    "torch.ops": _called("torch.ops", "load_library", text("x.so")),
    "add_safe_globals": _called("torch.serialization", "add_safe_globals", b"]" + _X + b"a"),
    "dotted Metadata": _dotted(_METADATA, "Metadata.__init__.__globals__"),
    "dotted OrderedDict": _dotted("collections", "OrderedDict.__init__"),
    "dotted module": _dotted("torch", "serialization.os.system"),
    "INST": (b"(" + _TOUCH + b"ios\nsystem\n", "os.system"),
    "OBJ": (b"(" + _SYSTEM + _TOUCH + b"o", "os.system"),
    "subprocess": _called("subprocess", "Popen", b"]" + text("true") + b"a"),
    "socket": _called("socket", "socket"),
    "codecs.decode": _called("_codecs", "decode", value("eA=="), text("base64")),
    "copyreg._reconstructor": _called(
        "copyreg", "_reconstructor", ORDERED, name("builtins", "object"), b"N"
    ),
    "own code": _called("torch_dcpx.unpickle.stand_ins", "stand_in", _X, text("y")),
    "bytes storage class": _called("torch.storage", "_load_from_bytes", value(b"x")),
}

_RANGE = call(name("builtins", "range"), value(0), value(10**12), value(1))
# id -> pickle of allowed names only, that patches, plants, or asks for more than it brings.
CORRUPT: dict[str, bytes] = {
    "setattr on a class": state(NAMESPACE, slots(__init__=1)),
    "setattr on a function": state(name("_codecs", "encode"), slots(__doc__="x")),
    "setattr on torch.Size": state(SIZE, slots(x=1)),
    "setattr on a dtype": state(name("torch", "float32"), slots(x=1)),
    "dict update of a class": state(ORDERED, value({"__init__": 1})),
    "state of a class": state(NAMESPACE, value({"a": 1})),
    "append to a class": ORDERED + b"Na",
    "item of a class": ORDERED + value("a") + value(1) + b"s",
    "calls a str": call(text("x")),
    "calls an object": call(call(ORDERED)),
    "NEWOBJ of a str": new(text("x")),
    "range in a set": call(name("builtins", "set"), _RANGE),
    "list of a range": call(name("builtins", "list"), _RANGE),
    "giant bytes": call(name("builtins", "bytes"), value(10**12)),
    "giant bytearray": call(name("builtins", "bytearray"), value(10**12)),
    "a global itself": name("_codecs", "encode"),
    "bytes by another codec": call(name("_codecs", "encode"), text("x"), text("rot13")),
    "negative size": call(SIZE, value((-1,))),
    "size past 2^63": call(SIZE, value((2**63,))),
    "unknown layout": call(name("torch.serialization", "_get_layout"), text("torch.nn")),
    "persistent id": b"Pabc\n",
    "extension registry": b"\x82\x01",
    "memo bomb": b"Nr\xff\xff\xff\x7f",
    "giant bytearray opcode": b"\x96" + (2**40).to_bytes(8, "little"),
    "giant frame": b"\x95" + (2**62).to_bytes(8, "little") + b"N",
    "giant bytes opcode": b"\x8e" + (2**40).to_bytes(8, "little"),
    "out-of-band buffer": b"\x97",
    "deep": b"(" * 100_000 + b"t" * 100_000,
    "deep lists": b"]" * 100_000 + b"a" * 99_999,
    "empty stack": b"0",
    "unknown opcode": b"\xff",
    "not utf-8": b"X\x01\x00\x00\x00\xff",
    "unhashable key": b"}" + b"]" + b"Ns",
    "memo miss": b"h\x05",
}


def storage(numel: Any, key: str = "0", kind: bytes = b"", location: str = "cpu") -> bytes:
    """A persistent id."""
    kind = kind or name("torch", "FloatStorage")
    key, location = text(key), text(location)
    return b"(" + text("storage") + kind + key + location + value(numel) + b"tQ"


def tensor_pickle(
    numel: Any, offset: Any = 0, sizes: Any = (2,), strides: Any = (1,), **kwargs: Any
) -> bytes:
    """A float32 tensor, by default of two elements."""
    hooks = call(ORDERED)
    args = [value(x) for x in (offset, sizes, strides, False)]
    return call(TENSOR_V2, storage(numel, **kwargs), *args, hooks)


def torch_zip(
    data_pkl: bytes, records: dict[str, bytes] | None = None, byteorder: bytes = b"little"
) -> bytes:
    """A torch.save archive around a given pickle."""
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/byteorder", byteorder)
        for record, data in (records or {}).items():
            archive.writestr(f"archive/{record}", data)
        archive.writestr("archive/version", b"3\n")
    return result.getvalue()
