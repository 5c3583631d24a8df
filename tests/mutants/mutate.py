"""Makes tests/mutants/list.jsonl: small edits of the product that some test is to find.

    python tests/mutants/mutate.py            prints what it would add
    python tests/mutants/mutate.py --write    adds to the list what is missing of each room's count

A mutant is a line: the file, `old`, a text that the file has once, `new`, which takes its place,
and the test that found it last (hunt.py). What people made, kind "planted", stays as it is.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("list.jsonl")
SEED = 47

# Globs of one room's files -> its number of mutants.
ROOMS: dict[tuple[str, ...], int] = {
    ("torch_dcpx/writer/*.py",): 18,
    ("torch_dcpx/reader/*.py",): 18,
    ("torch_dcpx/ranks/*.py",): 18,
    ("torch_dcpx/manager/*.py",): 26,
    ("torch_dcpx/storage/*.py",): 22,
    ("torch_dcpx/integrity/*.py",): 12,
    ("csrc/plan/*.cpp", "csrc/dcp/dedup_items.cpp", "csrc/dcp/global_plan.cpp"): 20,
    ("csrc/engine/read_plan.cpp", "csrc/engine/write_layout.cpp", "csrc/io/*.cpp"): 16,
    ("csrc/format/*_footer.cpp", "csrc/format/zip_*.cpp", "csrc/engine/*_file.cpp"): 10,
}

_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_CALCULATED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
_CPP_SWAPS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ",
    " && ": " || ", " || ": " && ", " + ": " - ", " - ": " + ", " += ": " -= ",
    "std::min": "std::max", "std::max": "std::min", "true": "false", "false": "true",
}  # fmt: skip


class Edit(NamedTuple):
    """`text[begin:end]` becomes `new`."""

    kind: str
    begin: int
    end: int
    new: str


def python_edits(source: str) -> Iterator[Edit]:
    """Yields what may change in a module: comparisons, conditions, numbers, statements left out."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:  # columns count bytes; lines with others are left out
        begin, end = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    def between(left: Any, right: Any, new: str, kind: str) -> Edit:
        begin, end = span(left)[1], span(right)[0]
        inner = source[begin:end]
        kept = ")" * inner.count(")"), "(" * inner.count("(")
        return Edit(kind, begin, end, f"{kept[0]} {new} {kept[1]}")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            new = _COMPARED[type(node.ops[0])]
            yield between(node.left, node.comparators[0], new, "compare")
        elif isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            yield between(node.values[0], node.values[1], new, "boolean")
        elif isinstance(node, ast.BinOp) and type(node.op) in _CALCULATED:
            if not any(
                isinstance(side, (ast.Constant, ast.JoinedStr))
                and not isinstance(getattr(side, "value", ""), (int, float))
                for side in (node.left, node.right)
            ):
                yield between(node.left, node.right, _CALCULATED[type(node.op)], "arithmetic")
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            begin, end = span(node.test)
            yield Edit("condition", begin, end, f"not ({source[begin:end]})")
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield Edit("constant", *span(node), str(not node.value))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield Edit("constant", *span(node), str(node.value + 1))
        elif isinstance(node, (ast.Raise, ast.AugAssign, ast.Delete)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield Edit("left out", *span(node), "pass")
        elif isinstance(node, ast.Return) and isinstance(node.value, (ast.Call, ast.Name)):
            yield Edit("returned", *span(node), "return None")


def cpp_edits(source: str) -> Iterator[Edit]:
    """Yields what may change in a C++ file; comments, literals and #include stay."""
    literal = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^#[^\n]*'
    code = re.sub(literal, lambda m: " " * len(m[0]), source, flags=re.DOTALL | re.MULTILINE)
    for old, new in _CPP_SWAPS.items():
        for found in re.finditer(re.escape(old), code):
            yield Edit(old.strip(), *found.span(), new)
    for found in re.finditer(r"(?<=[\w(, ])(?<![\w.])(\d+)(?=[;), ])", code):
        yield Edit("constant", *found.span(), str(int(found[1]) + 1))
    for found in re.finditer(r"(?<=\n) +(?!return|throw|break)[\w.>\-:]+\([^;{}]*\);(?=\n)", code):
        yield Edit("left out", *found.span(), ";")


def mutant(file: str, source: str, edit: Edit) -> dict[str, str] | None:
    """Returns an entry of the list: whole lines, and as many before as make them unique."""
    first = source.rfind("\n", 0, edit.begin) + 1
    last = source.find("\n", edit.end)
    while source.count(source[first:last]) > 1 and first:
        first = source.rfind("\n", 0, first - 1) + 1
    old = source[first:last]
    new = source[first : edit.begin] + edit.new + source[edit.end : last]
    if not old.isascii() or source.count(old) != 1 or old == new:
        return None
    if file.endswith(".py"):
        try:
            compile(source.replace(old, new), file, "exec")
        except SyntaxError:
            return None
    return {"file": file, "kind": edit.kind, "old": old, "new": new}


def drawn(globs: tuple[str, ...], count: int, known: set[tuple[str, str, str]]) -> list[Any]:
    """Returns `count` mutants of a room's files that are not known: files and kinds in turn."""
    random_ = random.Random(f"{SEED} {globs}")
    edits: dict[str, dict[str, list[Edit]]] = {}
    files = sorted(path for glob in globs for path in ROOT.glob(glob))
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    for file, source in sources.items():
        for edit in (python_edits if file.endswith(".py") else cpp_edits)(source):
            edits.setdefault(file, {}).setdefault(edit.kind, []).append(edit)
    found: list[dict[str, str]] = []
    weights = {file: sum(map(len, kinds.values())) for file, kinds in edits.items()}
    while len(found) < count:
        (file,) = random_.choices(list(weights), list(weights.values()))
        kind = random_.choice(sorted(edits[file]))
        made = mutant(file, sources[file], random_.choice(edits[file][kind]))
        if made is not None and (made["file"], made["old"], made["new"]) not in known:
            known.add((made["file"], made["old"], made["new"]))
            found.append(made)
    return found


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LIST.read_text().splitlines()] if LIST.exists() else []


def write(mutants: list[dict[str, Any]]) -> None:
    LIST.write_text("".join(json.dumps(each) + "\n" for each in mutants))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="adds them to the list")
    arguments = parser.parse_args()
    mutants = read()
    known = {(each["file"], each["old"], each["new"]) for each in mutants}
    for globs, count in ROOMS.items():
        files = {str(path.relative_to(ROOT)) for glob in globs for path in ROOT.glob(glob)}
        there = sum(each["file"] in files and each["kind"] != "planted" for each in mutants)
        mutants += drawn(globs, max(0, count - there), known)
    if arguments.write:
        write(mutants)
    else:
        for each in mutants:
            print(f"{each['file']}: {each['kind']}\n-{each['old']}\n+{each['new']}")
