"""`dcpx export`: a checkpoint as files of safetensors or torch.save, and such files as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from torch_dcpx._compat import DTYPES
from torch_dcpx._globs import chosen_names, unmatched
from torch_dcpx._text import counted
from torch_dcpx.artifacts.export import export
from torch_dcpx.artifacts.opened import open_checkpoint
from torch_dcpx.checkpoint.save import save
from torch_dcpx.cli.output import FINE, put_json, put_lines
from torch_dcpx.errors import OptionError, PlanError, must_be
from torch_dcpx.integrity.artifact import find_artifact
from torch_dcpx.integrity.contents import open_contents
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.reader.hints import listed
from torch_dcpx.reader.safetensors import names_file
from torch_dcpx.storage.names import holds_checkpoint
from torch_dcpx.storage.object_url import Location, ObjectUrl
from torch_dcpx.writer.writer import DcpxWriter

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
Format = Literal["safetensors", "torch", "dcp"]


def run_export(
    source: Location,
    dest: Location,
    *,
    kind: Format | None,
    keys: Sequence[str],
    dtype: str | None,
    max_shard_bytes: str,
    unwrap: bool,
    config: str | None,
    merge_lora: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Converts, and prints what was written. Returns the exit code."""
    converted = _dtype(dtype)
    is_named = dest.suffix[1:].isalpha()  # a file; "run-1.5" is a directory
    of_exports = {"unwrap": unwrap, "config": config, "merge_lora": merge_lora}
    is_export = config is not None or merge_lora is not None
    if kind is None and not is_named and not is_export and find_artifact(source) is not None:
        kind = "dcp"
    _check_dest(source, dest, kind, overwrite)
    option = next((name for name, value in of_exports.items() if value), None)
    if option is not None and kind == "dcp":
        problem = f"--{option.replace('_', '-')} is for exports; a checkpoint is as its source"
        raise OptionError(problem, option=option, value=of_exports[option])
    if kind == "dcp":
        found = _to_checkpoint(source, dest, keys, converted, overwrite)
    else:
        report = export(
            source,
            dest,
            format=kind,
            keys=keys or None,
            key_map=KeyMap(wrappers=True if unwrap else None),
            max_shard_bytes=max_shard_bytes,
            dtype=converted,
            overwrite=overwrite,
            config=config,
            merge_lora=merge_lora,
            no_dist=True,
        )
        counts = {"tensors": report.tensors, "objects": report.objects}
        found = {"path": dest, **counts, "left_out": report.skipped}
    if as_json:
        put_json(found)
    else:
        tensors, objects = counted(found["tensors"], "tensor"), counted(found["objects"], "object")
        put_lines([f"wrote {tensors} and {objects} to '{dest}'"])
        if found["left_out"]:
            names = listed(found["left_out"])
            put_lines([f"left out {counted(len(found['left_out']), 'name')}: {names}"])
    return FINE


def _check_dest(source: Location, dest: Location, kind: Format | None, overwrite: bool) -> None:
    """Raises OptionError where the export would replace, or lie beside, what is there."""
    if not isinstance(dest, Path):
        _check_url(source, dest, kind, overwrite)
        return
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return
    way = "name another place"
    is_source = isinstance(source, Path) and dest.samefile(source)
    if overwrite and not is_source:
        is_checkpoint = dest.is_dir() and _holds_files(dest)
        # The library refuses a checkpoint beneath an export.
        if is_checkpoint or (kind != "dcp" and find_artifact(dest) is not None):
            return
        way += f": it is no {'checkpoint' if kind == 'dcp' else 'export'} that could be replaced"
    elif not is_source:
        way += ", or replace it by --overwrite"
    raise OptionError(f"'{dest}' is there; {way}", option="dest", value=str(dest))


def _holds_files(path: Path) -> bool:
    with open_contents(path) as there:
        return holds_checkpoint(there.look.names)


def _check_url(source: Location, dest: ObjectUrl, kind: Format | None, overwrite: bool) -> None:
    with open_contents(dest) as there:
        names, artifact = there.look.names, there.artifact
    is_file = names_file(dest)
    if not names or (is_file and dest.name not in names):
        return
    way = "name another place"
    if dest != source:
        is_same_kind = artifact in names if kind != "dcp" else holds_checkpoint(names)
        if overwrite and is_same_kind:
            return
        way += ", or replace one of the same kind by --overwrite"
    raise OptionError(f"'{dest}' is there; {way}", option="dest", value=str(dest))


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = DTYPES.get(_SHORT_DTYPES.get(name, name))
    if found is None or not found.is_floating_point:
        floating = {one for one, dtype in DTYPES.items() if dtype.is_floating_point}
        known = [*_SHORT_DTYPES, *sorted(floating)]
        raise must_be("dtype", name, f"one of {', '.join(known)}")
    return found


def _to_checkpoint(
    source: Location,
    dest: Location,
    keys: Sequence[str],
    dtype: torch.dtype | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Saves tensors and objects of files as a checkpoint. All of them are in memory meanwhile."""
    with open_checkpoint(source) as opened:
        names = [*opened, *opened.objects]
        for glob in unmatched(names, keys):
            opened.select(glob)  # raises UnknownNameError
        chosen = chosen_names(names, keys) if keys else names
        if not chosen:
            raise PlanError(f"export: '{source}' holds nothing to export; nothing was written")
        state: dict[str, Any] = dict(opened.load_tensors([one for one in chosen if one in opened]))
        for name, tensor in state.items():
            if dtype is not None and tensor.is_floating_point():
                state[name] = tensor.to(dtype)
        tensors = len(state)
        state |= {name: opened.objects[name] for name in chosen if name not in opened}
    writer = DcpxWriter(os.fspath(dest), overwrite=overwrite)
    try:
        save(state, storage_writer=writer, no_dist=True)
    except RuntimeError as error:
        if "overwrite=False" not in str(error):  # stock's text
            raise
        problem = f"'{dest}' is there by now; name another place, or replace it by --overwrite"
        raise OptionError(problem, option="dest", value=str(dest)) from error
    return {"path": dest, "tensors": tensors, "objects": len(state) - tensors, "left_out": []}
