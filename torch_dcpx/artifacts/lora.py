"""Merges an adapter of PEFT into the weights of an export: W + scaling * (B A), as peft does.

Each box of a weight gets its own part of the product when it is read, so that nobody holds a whole
weight. The adapter is in memory: `adapter_model.safetensors` or `.bin`, with its config beside it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_dcpx._answered_os import os
from torch_dcpx._compat import dtype_by_name
from torch_dcpx._json import parsed_json
from torch_dcpx._text import counted, printable
from torch_dcpx.artifacts.opened import load_tensors
from torch_dcpx.artifacts.rows import narrowed
from torch_dcpx.artifacts.sources import Change, Entry
from torch_dcpx.errors import OptionError, PlanError, UnsupportedError
from torch_dcpx.keys.mapped_tensor import Sizes
from torch_dcpx.keys.wrappers import unwrapped
from torch_dcpx.storage.directory import storage_errors

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")  # peft takes the first

_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.weight)?")
_OF_ADAPTER = re.compile(r"(^|\.)(lora_|modules_to_save\.|token_adapter\.)")
_OF_BASE = re.compile(r"(^|\.)(base_layer|original_module)(?=\.)")
# What makes another product, or another base, than the two factors say.
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # the base stays as it was


def base_name(name: str) -> str | None:
    """Returns the name of a tensor in the plain model; None: it is the adapter's."""
    bare = unwrapped(name).removeprefix(_PREFIX)
    return None if _OF_ADAPTER.search(bare) else _OF_BASE.sub("", bare).removeprefix(".")


class Product(NamedTuple):
    """Adds scaling * (B A) to a weight."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    is_transposed: bool
    is_rounded: bool  # to the weight's dtype before it is added, as peft does for embeddings

    def apply(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Changes a box of the weight, which begins at these offsets."""
        ends = [begin + length for begin, length in zip(offsets, box.shape, strict=True)]
        rows, columns = (slice(*each) for each in zip(offsets, ends, strict=True))
        if self.is_transposed:
            rows, columns = columns, rows
        product = self.b[rows] @ self.a[:, columns]
        product = (product.T if self.is_transposed else product) * self.scaling
        box.add_(product.to(box.dtype) if self.is_rounded else product)


class Replacement(NamedTuple):
    """Takes the place of a weight that was trained as a whole."""

    value: torch.Tensor

    def apply(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        box.copy_(narrowed(self.value, offsets, box.shape))


class Adapter:
    """An adapter, read. Immutable."""

    def __init__(self, directory: Path) -> None:
        """Reads it.

        Raises:
            OptionError: this is no adapter's directory.
            UnsupportedError: it is of another kind than plain LoRA.
            CorruptionError, StorageError: it cannot be read.
        """
        self.directory = directory
        content = self._content(CONFIG_NAME)
        try:
            config = parsed_json(content)
            self._config: dict[str, Any] = {**config}
            self._check()
            self._r, self._alpha = int(config["r"]), config["lora_alpha"] * 1
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._refused(f"'{CONFIG_NAME}' is no config of LoRA: {error!r:.80}") from error
        there = (name for name in WEIGHTS_NAMES if (directory / name).is_file())
        weights = next(there, WEIGHTS_NAMES[0])
        self.digest = hashlib.blake2b(content + self._content(weights)).hexdigest()[:16]
        tensors = load_tensors(directory / weights)
        self._values = {name.removeprefix(_PREFIX): one for name, one in tensors.items()}

    def changes(self, entries: Mapping[str, Entry], part: str) -> dict[str, list[Change]]:
        """Returns what changes stored tensors, in order, by their names.

        Args:
            entries: of the source.
            part: prefix of its model's names.

        Raises:
            PlanError: the source lacks a weight of the adapter, or has one of other sizes.
            UnsupportedError: a layer that this cannot merge, or a weight that is no floating one.
        """
        stored = {
            base_name(name.removeprefix(part)): name for name in entries if name.startswith(part)
        }
        found: dict[str, list[Change]] = {}
        missing = []
        for name, value in self._values.items():
            factor = _FACTOR.fullmatch(name)
            if factor is None and _OF_ADAPTER.search(name):
                raise self._unsupported(f"'{printable(name)}'")
            if factor is not None and factor["side"] == "B":
                continue
            target = f"{factor['module']}.weight" if factor is not None else base_name(name) or ""
            fqn = stored.get(target)
            if fqn is None:
                missing.append(target)
                continue
            entry = entries[fqn]
            dtype = dtype_by_name(str(entry.dtype))
            if dtype is None or not dtype.is_floating_point:
                raise self._unsupported(f"a weight of {entry.dtype}, '{printable(fqn)}'")
            sizes = entry.sizes or ()
            if factor is not None:
                found.setdefault(fqn, []).append(self._product(factor, value, fqn, sizes))
            elif tuple(value.shape) == sizes:  # comes before what is added to it
                found.setdefault(fqn, []).insert(0, Replacement(value))
            else:
                raise self._unfit(fqn, sizes, f"{list(value.shape)}")
        if missing:
            shown = ", ".join(f"'{printable(name)}'" for name in missing[:5])
            raise PlanError(
                f"merge_lora='{self.directory}' changes {counted(len(missing), 'weight')} that "
                f"the source does not hold: {shown}; export the base model that it was trained on, "
                "or a checkpoint that holds it",
                fqn=missing[0],
            )
        return found

    def _product(self, factor: re.Match[str], a: torch.Tensor, fqn: str, sizes: Sizes) -> Product:
        name = factor.string
        at = factor.start("side")
        b = self._values.get(f"{name[:at]}B{name[at + 1 :]}")
        if b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            shapes = f"{list(a.shape)} and {'nothing' if b is None else list(b.shape)}"
            raise self._unsupported(f"'{printable(name)}' whose factors A and B are {shapes}")
        made = (b.shape[0], a.shape[1])
        ways = [swapped for swapped in (False, True) if (made[::-1] if swapped else made) == sizes]
        if not ways:
            raise self._unfit(fqn, sizes, f"{list(made)}, the product of B and A")
        wanted = bool(factor["kind"] or self._config.get("fan_in_fan_out"))
        is_transposed = wanted if len(ways) == 2 else ways[0]
        if a.dtype.itemsize < 4:
            a, b = a.float(), b.float()  # as peft loads and multiplies them
        scaling = self._scaling(factor["module"], a.shape[0])
        return Product(a, b, scaling, is_transposed, bool(factor["kind"]))

    def _scaling(self, module: str, rank: int) -> float:
        patterns: Mapping[str, Any] = self._config.get("alpha_pattern") or {}
        key = next((one for one in patterns if re.match(rf"(.*\.)?({one})$", module)), None)
        alpha = self._alpha if key is None else patterns[key]
        return float(alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank))

    def _check(self) -> None:
        config = self._config
        kind, start = config.get("peft_type"), config.get("init_lora_weights")
        if kind != "LORA":
            raise self._unsupported(f"peft_type={kind!r:.80}")
        for name in _REFUSED:
            if config.get(name):
                raise self._unsupported(f"{name}={config[name]!r:.80}")
        if start not in _PLAIN_STARTS:
            raise self._unsupported(f"init_lora_weights={start!r:.80}, which changes the base")

    def _content(self, name: str) -> bytes:
        path = self.directory / name
        if not path.is_file():
            raise self._refused(f"there is no '{name}' in it{self._way()}")
        with storage_errors("read", path, is_read=True):
            return path.read_bytes()

    def _way(self) -> str:
        """Returns which directory may be meant: peft makes one in it of an adapter with a name."""
        own = self.directory
        beneath = [path.parent for path in sorted(own.glob(f"*/{CONFIG_NAME}"))]
        meant = beneath if own.is_dir() else [own.parent] * (own.parent / CONFIG_NAME).is_file()
        if meant:
            return "; did you mean " + ", ".join(f"'{path}'" for path in meant[:5]) + "?"
        is_there = os.path.lexists(own)
        return "" if is_there else "; nothing is there: `hf download` brings one from the Hub"

    def _refused(self, why: str) -> OptionError:
        problem = f"merge_lora='{self.directory}' must name an adapter's directory: {why}"
        return OptionError(problem, option="merge_lora", value=os.fspath(self.directory))

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"merge_lora='{self.directory}' has {what}: only plain LoRA of linear and embedding "
            "layers can be merged here; export takes the module of peft's merge_and_unload()"
        )

    def _unfit(self, fqn: str, sizes: Sizes, what: str) -> PlanError:
        return PlanError(
            f"merge_lora='{self.directory}': '{printable(fqn)}' of sizes {list(sizes)} does not "
            f"fit {what}",
            fqn=fqn,
        )
