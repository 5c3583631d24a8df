"""Pickles that would run something in a plain unpickler, in every form of call, in every place.

Arguments are inert: a gadget that ran would touch `MARK` beneath `outside`, or change a flag that
the driver compares.
"""

# ruff: noqa: ARG005  a table of one form
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from hostile import pickles as hp
from hostile.corpus import PICKLE_PLACES, Case

T, V, N = hp.text, hp.value, hp.name


def _mark(root: Path) -> str:
    return str(root / "outside" / "MARK")


def _touch(root: Path) -> bytes:
    return T(f"touch {_mark(root)}")


def _code(root: Path) -> bytes:
    return T(f"open({_mark(root)!r}, 'w')")


def _path(root: Path) -> bytes:
    return T(_mark(root))


def _outside(root: Path) -> bytes:
    return T(str(root / "outside"))


def _list(*parts: bytes) -> bytes:
    return b"](" + b"".join(parts) + b"e"


Args = Callable[[Path], tuple[bytes, ...]]
# module, name, arguments of a call that would be seen.
GADGETS: list[tuple[str, str, Args]] = [
    ("os", "system", lambda r: (_touch(r),)),
    ("posix", "system", lambda r: (_touch(r),)),
    ("nt", "system", lambda r: (_touch(r),)),
    ("os", "popen", lambda r: (_touch(r),)),
    ("os", "mkdir", lambda r: (_path(r),)),
    ("os", "remove", lambda r: (T(str(r / "outside" / "secret")),)),
    ("os", "execv", lambda r: (T("/bin/touch"), _list(T("touch"), _path(r)))),
    ("os", "posix_spawn", lambda r: (T("/bin/touch"), _list(T("touch"), _path(r)), b"}")),
    ("os", "putenv", lambda r: (T("DCPX_MARK"), T("1"))),
    ("os", "chdir", lambda r: (_outside(r),)),
    ("os", "kill", lambda r: (V(0), V(0))),
    ("builtins", "eval", lambda r: (_code(r),)),
    ("builtins", "exec", lambda r: (_code(r),)),
    ("builtins", "compile", lambda r: (_code(r), T("x"), T("exec"))),
    ("builtins", "open", lambda r: (_path(r), T("w"))),
    ("builtins", "__import__", lambda r: (T("antigravity"),)),
    ("builtins", "getattr", lambda r: (N("os", "path"), T("os"))),
    ("builtins", "setattr", lambda r: (N("argparse", "Namespace"), T("mark"), V(1))),
    ("builtins", "delattr", lambda r: (N("argparse", "Namespace"), T("__init__"))),
    ("builtins", "map", lambda r: (N("os", "system"), _list(_touch(r)))),
    ("builtins", "apply", lambda r: (N("os", "system"), _list(_touch(r)))),
    ("builtins", "type", lambda r: (T("X"), b")", b"}")),
    ("builtins", "breakpoint", lambda r: ()),
    ("io", "open", lambda r: (_path(r), T("w"))),
    ("_io", "FileIO", lambda r: (_path(r), T("w"))),
    ("_io", "open_code", lambda r: (_path(r),)),
    ("pathlib", "Path.touch", lambda r: (_path(r),)),
    ("pkgutil", "resolve_name", lambda r: (T("os:system"),)),
    ("importlib", "import_module", lambda r: (T("antigravity"),)),
    ("importlib.machinery", "SourceFileLoader", lambda r: (T("x"), _path(r))),
    ("runpy", "run_path", lambda r: (_path(r),)),
    ("functools", "partial", lambda r: (N("os", "system"), _touch(r))),
    ("functools", "reduce", lambda r: (N("os", "system"), _list(_touch(r), V(1)))),
    ("operator", "attrgetter", lambda r: (T("__globals__"),)),
    ("operator", "methodcaller", lambda r: (T("system"), _touch(r))),
    ("operator", "itemgetter", lambda r: (T("system"),)),
    ("copyreg", "__newobj__", lambda r: (N("os", "_wrap_close"),)),
    ("copyreg", "_reconstructor", lambda r: (hp.ORDERED, N("builtins", "object"), b"N")),
    ("copyreg", "pickle", lambda r: (N("torch", "Size"), N("os", "system"))),
    ("copyreg", "add_extension", lambda r: (T("os"), T("system"), V(1))),
    ("types", "FunctionType", lambda r: (b"N", b"}")),
    ("types", "CodeType", lambda r: (V(0),) * 6),
    ("ctypes", "CDLL", lambda r: (b"N",)),
    ("ctypes", "string_at", lambda r: (V(0),)),
    ("subprocess", "Popen", lambda r: (_list(T("touch"), _path(r)),)),
    ("subprocess", "check_output", lambda r: (_list(T("touch"), _path(r)),)),
    ("_posixsubprocess", "fork_exec", lambda r: ()),
    ("multiprocessing.util", "spawnv_passfds", lambda r: ()),
    ("socket", "socket", lambda r: ()),
    ("socket", "create_connection", lambda r: (b"(" + T("127.0.0.1") + V(9) + b"t",)),
    ("urllib.request", "urlopen", lambda r: (T("http://127.0.0.1:9/"),)),
    ("webbrowser", "open", lambda r: (T("http://127.0.0.1:9/"),)),
    ("shutil", "rmtree", lambda r: (_outside(r),)),
    ("shutil", "copyfile", lambda r: (T(str(r / "outside" / "secret")), _path(r))),
    ("logging.config", "dictConfig", lambda r: (V({"version": 1}),)),
    ("logging.config", "fileConfig", lambda r: (_path(r),)),
    ("logging", "FileHandler", lambda r: (_path(r),)),
    ("tempfile", "mktemp", lambda r: ()),
    ("pdb", "run", lambda r: (_code(r),)),
    ("timeit", "timeit", lambda r: (_code(r),)),
    ("code", "interact", lambda r: ()),
    ("sys", "exit", lambda r: ()),
    ("_thread", "interrupt_main", lambda r: ()),
    ("marshal", "loads", lambda r: (V(b"N"),)),
    ("pickle", "loads", lambda r: (V(b"N."),)),
    ("_pickle", "loads", lambda r: (V(b"N."),)),
    ("numpy", "load", lambda r: (_path(r),)),
    ("numpy.f2py", "compile", lambda r: (T("x"),)),
    ("numpy.testing._private.utils", "runstring", lambda r: (_code(r), b"}")),
    ("numpy", "save", lambda r: (_path(r), V(1))),
    ("torch", "load", lambda r: (_path(r),)),
    ("torch", "save", lambda r: (V(1), _path(r))),
    ("torch.serialization", "load", lambda r: (_path(r),)),
    ("torch.serialization", "add_safe_globals", lambda r: (_list(N("os", "system")),)),
    ("torch.serialization", "clear_safe_globals", lambda r: ()),
    ("torch.serialization", "os.system", lambda r: (_touch(r),)),
    ("torch.storage", "_load_from_bytes", lambda r: (V(b"x"),)),
    ("torch.hub", "load", lambda r: (T("x/y"), T("z"))),
    ("torch.hub", "download_url_to_file", lambda r: (T("http://127.0.0.1:9/"), _path(r))),
    ("torch.utils.cpp_extension", "load", lambda r: (T("x"), _list(_path(r)))),
    ("torch.utils.model_zoo", "load_url", lambda r: (T("http://127.0.0.1:9/"),)),
    ("torch.utils.collect_env", "run", lambda r: (_touch(r),)),
    ("torch.utils._config_module", "load_config", lambda r: (V(b"x"),)),
    ("torch.jit", "load", lambda r: (_path(r),)),
    ("torch.jit", "script", lambda r: (T("x"),)),
    ("torch.jit.unsupported_tensor_ops", "execWrapper", lambda r: (_code(r), b"}", b"}")),
    ("torch.package", "PackageImporter", lambda r: (_path(r),)),
    ("torch.ops", "load_library", lambda r: (_path(r),)),
    ("torch.classes", "load_library", lambda r: (_path(r),)),
    ("torch", "set_default_dtype", lambda r: (N("torch", "float64"),)),
    ("torch", "set_default_device", lambda r: (T("meta"),)),
    ("torch", "set_num_threads", lambda r: (V(3),)),
    ("torch", "manual_seed", lambda r: (V(3),)),
    ("torch", "from_file", lambda r: (_path(r), V(True), V(8))),
    ("torch", "UntypedStorage.from_file", lambda r: (_path(r), V(True), V(8))),
    ("torch._dynamo", "reset", lambda r: ()),
    ("torch._inductor.codecache", "compile_file", lambda r: (_path(r), _path(r), _list(T("x")))),
    ("torch.distributed", "init_process_group", lambda r: (T("gloo"),)),
    ("torch.distributed.checkpoint.state_dict_loader", "load", lambda r: (b"}",)),
    ("torch.fx.graph_module", "reduce_graph_module", lambda r: (b"}", T("import antigravity"))),
    ("torch_dcpx.unpickle.stand_ins", "stand_in", lambda r: (T("x"), T("y"))),
    ("torch_dcpx.storage.directory", "os.system", lambda r: (_touch(r),)),
]  # fmt: skip


def _short_name(module: str, name: str) -> bytes:
    parts = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)]
    return parts[0] + b"\x94" + parts[1] + b"\x94\x93"


def _text_name(module: str, name: str) -> bytes:  # protocol 0 text in a protocol 4 name
    return b"".join(b"V" + part.encode() + b"\n" for part in (module, name)) + b"\x93"


stack_global = hp.stack_name
NAMES: dict[str, Callable[[str, str], bytes]] = {
    "global_": N,
    "stack_global": stack_global,
    "short_stack_global": _short_name,
    "text_stack_global": _text_name,
}


def newobj(function: bytes, args: tuple[bytes, ...]) -> bytes:
    return hp.new(function, *args)


def newobj_ex(function: bytes, args: tuple[bytes, ...]) -> bytes:
    return function + b"(" + b"".join(args) + b"t}\x92"


def _built(function: bytes, _: tuple[bytes, ...]) -> bytes:
    """A state whose keys are what pickle, copy and BUILD themselves would call."""
    fields = b"}(" + T("__setstate__") + function + T("__reduce_ex__") + function + b"u"
    return hp.state(hp.call(hp.NAMESPACE), fields)


def _partial_chain(function: bytes, args: tuple[bytes, ...]) -> bytes:
    made = function
    for _ in range(3):
        made = hp.call(N("functools", "partial"), made)
    return hp.call(made, *args)


Call = Callable[[bytes, tuple[bytes, ...]], bytes]
CALLS: dict[str, Call] = {
    "reduce": lambda function, args: hp.call(function, *args),
    "newobj": newobj,
    "newobj_ex": newobj_ex,
    "obj": lambda function, args: b"(" + function + b"".join(args) + b"o",
    "built": _built,
    "as_key": lambda function, args: b"}" + hp.call(function, *args) + b"Ns",
    "persistent": lambda function, args: hp.call(function, *args) + b"Q",
    "partial_chain": _partial_chain,
}

# Whole bodies: no name is called, or none is needed.
BODIES: dict[str, bytes] = {
    "EXT1": b"\x82\x01)R",
    "EXT2": b"\x83\x01\x00)R",
    "EXT4": b"\x84\x01\x00\x00\x00)R",
    "PERSID": b"Pos.system\n",
    "BUILD on a class": hp.state(hp.NAMESPACE, V({"mark": 1})),
    "BUILD slots on a class": hp.state(hp.NAMESPACE, hp.slots(mark=1)),
    "BUILD slots on torch.Size": hp.state(hp.SIZE, hp.slots(mark=1)),
    "BUILD on a dtype": hp.state(N("torch", "float32"), V({"mark": 1})),
    "BUILD on a function": hp.state(N("_codecs", "encode"), V({"mark": 1})),
    "SETITEM on a class": hp.ORDERED + T("mark") + V(1) + b"s",
    "APPEND to a class": hp.ORDERED + V(1) + b"a",
    "nested getattr": hp.call(
        N("builtins", "getattr"),
        hp.call(N("builtins", "getattr"), hp.ORDERED, T("__init__")),
        T("__globals__"),
    ),
    "dotted globals": hp.stack_name("collections", "OrderedDict.__init__.__globals__"),
    "dotted subclasses": hp.call(hp.stack_name("builtins", "object.__subclasses__")),
    "dunder attribute": hp.state(hp.call(hp.NAMESPACE), V({"__class__": 1, "__dict__": 2})),
    "dunder module": N("__main__", "__builtins__"),
    "empty names": N("", ""),
    "NUL in a name": N("os\0", "system"),
    "relative module": N(".os", "system"),
}


def cases() -> Iterator[Case]:
    places = list(PICKLE_PLACES)
    names, calls = list(NAMES.items()), list(CALLS.items())
    for number, (module, name, args) in enumerate(GADGETS):
        for shift, place in enumerate(places):
            # A form for each gadget and place, so that all pairs of forms and places occur.
            by_name, named = names[(number + shift) % len(names)]
            by_call, called = calls[(number // 2 + 3 * shift) % len(calls)]
            build = partial(_build, place, partial(_gadget, named(module, name), called, args))
            yield Case(f"gadget in {place}", f"{module}.{name} by {by_name} {by_call}", build)
    for place in places:
        for label, body in BODIES.items():
            build = partial(_build, place, lambda _, body=body: body)
            yield Case(f"gadget in {place}", label, build)
        for gadget in GADGETS[:4]:
            build = partial(_build, place, partial(_inst, *gadget))
            yield Case(f"gadget in {place}", f"INST {gadget[0]}.{gadget[1]}", build)


def _gadget(function: bytes, called: Call, args: Args, root: Path) -> bytes:
    return called(function, args(root))


def _inst(module: str, name: str, args: Args, root: Path) -> bytes:
    return b"(" + b"".join(args(root)) + f"i{module}\n{name}\n".encode()


def _build(place: str, body: Callable[[Path], bytes], root: Path) -> None:
    PICKLE_PLACES[place](root, hp.document(body(root)))
