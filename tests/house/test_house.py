"""The house's rules, read from its sources: who includes and imports whom, how long a file is.

One way only: common <- format, plan, io, device (over plan) <- engine <- dcp <- bind <-
torch_dcpx.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from rooms import (
    GROUND,
    MODULES_WITHOUT_TORCH,
    OTHER_TESTS,
    PACKAGE_ROOMS,
    PYTHON_ROOMS,
    ROOMS,
)

import torch_dcpx
from torch_dcpx._answered_os import _BY_PATH, _BY_TWO_PATHS, _OF_PATH

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "torch_dcpx"

MAX_LINES = 400

FOREIGN_HEADER = re.compile(
    r"^(torch|ATen|c10|caffe2)/|^(cuda|cuda_runtime|cuda_runtime_api|cudaTypedefs|driver_types)\.h$"
)
# Only compares own declarations with the toolkit's, where the build found a toolkit.
READS_CUDA_H = "device/cuda_abi_check.cpp"
PYTHON_HEADER = re.compile(r"^pybind11/|^Python\.h$")
ENDS_THE_PROCESS = re.compile(
    r"(?<![\w.>])(?:std::|::)?(assert|printf|fprintf|puts|abort|exit|_exit|_Exit|quick_exit"
    r"|terminate)\s*\(|std::c(?:out|err|log)\b"
)


TAKES_THE_GIL = re.compile(r"gil_scoped_\w+|PyGILState_\w+|PyEval_\w+Thread")


def cpp_files() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))


def python_modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """Returns the room of a module of torch_dcpx; "" for the ground."""
    return "/".join(path.relative_to(PACKAGE).parts[:-1])


def dotted(path: Path) -> str:
    """Returns a module's name beneath torch_dcpx: "storage.names"; a room's own is the room's."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def code_of(source: str) -> str:
    """Returns C++ source with comments and literals blanked, lines kept."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    return re.sub(pattern, lambda m: "\n" * m[0].count("\n"), source, flags=re.DOTALL)


def includes(source: str) -> Iterator[tuple[bool, str]]:
    """Yields (is_system, header) of each #include."""
    for match in re.finditer(r'^\s*#\s*include\s*(?:<([^>]+)>|"([^"]+)")', source, re.MULTILINE):
        yield match[1] is not None, match[1] or match[2]


def forbidden_includes(room: str, source: str) -> list[str]:
    """Returns what a file of `room` includes and may not."""
    allowed = ROOMS[room] | {room}
    found = []
    for is_system, header in includes(source):
        is_foreign = FOREIGN_HEADER.search(header) is not None
        is_python = PYTHON_HEADER.search(header) is not None and room not in PYTHON_ROOMS
        is_upward = not is_system and header.split("/")[0] not in allowed
        if is_foreign or is_python or is_upward:
            found.append(header)
    return found


def imports(tree: ast.AST) -> set[str]:
    """Returns the dotted names that a module of torch_dcpx imports, relative ones made absolute."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # at the front door only
                base = f"torch_dcpx.{base}".rstrip(".")
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def runtime_imports(path: Path) -> set[str]:
    """Returns `imports` without those under `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return imports(tree)


def uses(names: set[str], package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in names)


# ---- csrc ---------------------------------------------------------------------------------------


def test_csrc_has_the_rooms_of_the_table_and_no_other() -> None:
    rooms = {path.relative_to(CSRC).parts[0] for path in cpp_files()}
    assert rooms <= set(ROOMS)
    assert {"common", "bind"} <= rooms


def test_the_table_of_rooms_has_no_cycle() -> None:
    order = list(ROOMS)
    for room, below in ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in below), room


def test_includes_point_one_way_and_name_files_from_the_root_of_csrc() -> None:
    wrong = {}
    for path in cpp_files():
        name, source = str(path.relative_to(CSRC)), path.read_text()
        found = forbidden_includes(path.relative_to(CSRC).parts[0], source)
        if found != (["cuda.h", "cudaTypedefs.h"] if name == READS_CUDA_H else []):
            wrong[name] = found
        quoted = [header for is_system, header in includes(source) if not is_system]
        if missing := [header for header in quoted if not (CSRC / header).is_file()]:
            wrong[name] = missing
    assert wrong == {}


def test_csrc_neither_prints_nor_ends_the_process_and_only_gil_h_takes_the_gil() -> None:
    wrong = []
    for path in cpp_files():
        code = code_of(path.read_text())
        wrong += [(path.name, match[0]) for match in ENDS_THE_PROCESS.finditer(code)]
        if path.stem != "gil":
            wrong += [(path.name, name) for name in TAKES_THE_GIL.findall(code)]
    assert wrong == []


# ---- torch_dcpx ---------------------------------------------------------------------------------


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_only_the_gate_imports_the_extension() -> None:
    users = [dotted(path) for path in python_modules()
             if uses(imports(tree_of(path)), "torch_dcpx._C")]  # fmt: skip
    assert users == ["_native"]


def test_imports_between_rooms_point_one_way() -> None:
    modules = {dotted(module) for module in python_modules()}
    wrong = {}
    for path in python_modules():
        room = room_of(path)
        if path == PACKAGE / "__init__.py" or (not room and path.stem not in GROUND):
            continue
        own = {name.removeprefix("torch_dcpx.") for name in imports(tree_of(path))} & modules
        rooms = {name.split(".")[0] if "." in name else "" for name in own}
        allowed = PACKAGE_ROOMS[room] | {room, ""} if room else {""}
        if not rooms <= allowed:
            wrong[dotted(path)] = rooms - allowed
    assert wrong == {}


def test_every_folder_is_a_room_of_the_table_and_none_hides_a_public_name() -> None:
    rooms = {room_of(path) for path in python_modules()} - {""}
    assert rooms <= set(PACKAGE_ROOMS)
    assert not set(PACKAGE_ROOMS) & set(torch_dcpx.__all__)
    order = list(PACKAGE_ROOMS)
    for room, below in PACKAGE_ROOMS.items():
        assert all(order.index(other) < order.index(room) for other in below), room


def test_a_rooms_own_file_only_says_what_it_holds() -> None:
    for path in python_modules():
        if path.name == "__init__.py" and room_of(path) not in ("", "cli"):
            assert [type(node) for node in tree_of(path).body] == [ast.Expr], path


def test_light_modules_import_neither_torch_nor_a_module_that_does() -> None:
    modules = {dotted(module) for module in python_modules()} - set(PACKAGE_ROOMS)
    for light in MODULES_WITHOUT_TORCH:
        names = runtime_imports(PACKAGE / f"{light.replace('.', '/')}.py")
        assert not uses(names, "torch"), light
        own = {each.removeprefix("torch_dcpx.") for each in names}
        assert own & modules <= MODULES_WITHOUT_TORCH, light


def test_the_packages_imports_form_no_cycle() -> None:
    modules = {dotted(path): path for path in python_modules() if path.name != "__init__.py"}
    below = {
        name: {each.removeprefix("torch_dcpx.") for each in runtime_imports(path)}
        & (set(modules) - {name})
        for name, path in modules.items()
    }
    while below:
        leaves = {name for name, others in below.items() if not others & set(below)}
        assert leaves, f"a cycle among {sorted(below)}"
        below = {name: others for name, others in below.items() if name not in leaves}


def version_questions(tree: ast.AST) -> list[str]:
    """Returns where a module asks which torch runs or what it has; a message may name it."""
    in_messages = {
        id(node)
        for message in ast.walk(tree)
        if isinstance(message, ast.JoinedStr)
        for node in ast.walk(message)
    }
    found = []
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call)) else ""
        asks = re.match(r"(hasattr|getattr)\(torch\b", text) or text.startswith(
            ("torch.version.", "torch.torch_version")
        )
        is_read = text == "torch.__version__" and id(node) not in in_messages
        is_fields = isinstance(node, ast.Attribute) and node.attr == "__dataclass_fields__"
        if asks or is_read or is_fields or text.startswith("dataclasses.fields("):
            found.append(text)
    return found


def test_only_compat_asks_which_torch_runs() -> None:
    found = {dotted(path): version_questions(tree_of(path)) for path in python_modules()}
    assert {name for name, questions in found.items() if questions} == {"_compat"}


# These ask storage by `os` itself: of this node alone, or as what has the others answered.
PLAIN_OS = {"_mounts", "cli.output", "staging.staged_state"}


def waits_for_storage(tree: ast.AST) -> list[str]:
    """Returns the calls that a module which imports `os` itself makes for storage."""
    nodes = list(ast.walk(tree))
    plain = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names = (*_BY_PATH, *_BY_TWO_PATHS, "open", "close", "scandir", "walk")
    asked = {f"os.{name}" for name in names} | {f"os.path.{name}" for name in _OF_PATH}
    found = {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)}
    return sorted(found & asked) if "os" in plain else []


def test_storage_is_asked_where_no_call_waits_without_end() -> None:
    found = {dotted(path): waits_for_storage(tree_of(path)) for path in python_modules()}
    waiting = {name: calls for name, calls in found.items() if calls}
    assert waiting.keys() == PLAIN_OS, waiting


def test_no_buffer_of_a_stream_is_taken() -> None:
    """Python 3.12.1 crashes as it collects a cycle with one; `getvalue` copies nothing either."""
    assert [path for path in python_modules() if ".getbuffer(" in path.read_text()] == []


def test_the_folders_of_tests_mirror_the_rooms() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == set(PACKAGE_ROOMS) | OTHER_TESTS


def test_there_is_one_conftest() -> None:
    """A second one would be what `from conftest import` finds, in the folders after its own."""
    assert list((ROOT / "tests").rglob("conftest.py")) == [ROOT / "tests" / "conftest.py"]


# ---- Sizes --------------------------------------------------------------------------------------


def source_files() -> list[Path]:
    suffixes = (".h", ".cpp", ".cu", ".cuh", ".py", ".pyi")
    folders = [CSRC, PACKAGE, ROOT / "tests", ROOT / "examples"]
    return sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in suffixes)


def test_no_file_is_longer_than_a_reader_bears() -> None:
    lines = {path.relative_to(ROOT): path.read_text().count("\n") for path in source_files()}
    assert {str(path): n for path, n in lines.items() if n > MAX_LINES} == {}


MAX_FUNCTION_LINES = 60  # but public calls, which their docstrings make long


def long_functions(path: Path) -> list[str]:
    """Returns the functions of a module that fit no screen; public calls do not count."""
    found = []
    for owner in ast.walk(tree_of(path)):
        for node in ast.iter_child_nodes(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                surface = node.name if isinstance(owner, ast.Module) else getattr(owner, "name", "")
                is_public = surface in torch_dcpx.__all__ and not node.name.startswith("_")
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES and not is_public:
                    found.append(f"{dotted(path)}.{node.name}: {lines} lines")
    return found


def test_functions_fit_a_screen_in_the_formatters_layout() -> None:
    assert [one for path in python_modules() for one in long_functions(path)] == []
    cut = [dotted(path) for path in python_modules() if "# fmt:" in path.read_text()]
    assert cut == [], "a limit of lines cuts no layout"


# ---- The rules themselves -----------------------------------------------------------------------


def test_the_rules_find_what_they_look_for_and_nothing_else() -> None:
    includes_of = {
        "plan": ('"common/bytes.h"', '"io/file.h"'),
        "engine": ("<fcntl.h>", "<pybind11/pybind11.h>"),
        "bind": ("<pybind11/pybind11.h>", "<torch/extension.h>"),
        "device": ('"plan/box.h"', "<c10/cuda/CUDAStream.h>"),
    }
    for room, (allowed, forbidden) in includes_of.items():
        assert forbidden_includes(room, f"int a;\n  #  include {allowed}\n") == []
        assert forbidden_includes(room, f"#include {forbidden}\n") != []
    for code in ("  assert(x);", "std::abort();", "::exit(1);", "std::cerr << 1;"):
        assert ENDS_THE_PROCESS.search(code_of(code))
    for code in ("static_assert(x);", 'throw "exit(1)"; // assert(x)', "job.abort();"):
        assert not ENDS_THE_PROCESS.search(code_of(code))
    for code in ("hasattr(torch, 'x')", "torch.__version__ > '2'", "T.__dataclass_fields__"):
        assert version_questions(ast.parse(code))
    for code in ("f'torch {torch.__version__} lacks it'", "getattr(planner, 'resolve_data')"):
        assert not version_questions(ast.parse(code))
