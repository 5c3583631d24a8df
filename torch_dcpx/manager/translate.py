"""`resume(translate=)`: a KeyMap for the stored model, and the optimizers' names along with it.

1. Rules see the model's names without "model.", as those of `load_pretrained` and `export` do.
2. What an optimizer holds of a parameter gets the parameter's new name.
3. All other parts keep their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from torch_dcpx.errors import OptionError, PlanError, UnsupportedError
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.keys.rules import KeyRules, unwrapped

MODEL = "model."


class TrainingRules(KeyRules):
    """The rules of one resume. Belongs to one load, which asks them once. Not thread-safe."""

    def __init__(
        self, key_map: KeyRules, optimizers: Iterable[str], *, has_named_groups: bool
    ) -> None:
        """Translates as `key_map` does.

        Args:
            key_map: for the model.
            optimizers: names of the optimizers asked for; "" for one without a name.
            has_named_groups: whether the settings of groups are stored by parameter.
        """
        super().__init__(*key_map.rules, wrappers=key_map.wrappers)
        self._key_map = key_map
        whole = [f"optimizer.{name}." if name else "optimizer." for name in optimizers]
        kinds = ("state.", "param_groups.") if has_named_groups else ("state.",)
        self._prefixes = tuple(prefix + kind for prefix in whole for kind in kinds)
        self._new: dict[str, str | None] = {}  # by stored name; None: left out
        self._reshaped: dict[str, list[str | None]] = {}  # what is made of a stored one
        # What was asked for, and the answer: parts and planner ask, and functions are called once.
        self._resolved: tuple[Mapping[str, Sizes | None], dict[str, MappedTensor]] | None = None

    def resolve(
        self, stored: Mapping[str, Sizes | None], *, tensors_only: bool = False, part: str = ""
    ) -> dict[str, MappedTensor]:
        """Returns what the stored entries become, of all parts.

        Raises:
            PlanError: as the KeyMap; or an optimizer would have two entries of one name.
            UnsupportedError: an optimizer that is asked for has states of a tensor that is split,
                merged or transposed.
        """
        if self._resolved is not None and self._resolved[0] == stored:
            return self._resolved[1]
        mapped = self._key_map.resolve(stored, tensors_only=tensors_only, part=MODEL)
        self._note(mapped, stored)
        entries = {MODEL + name: entry for name, entry in mapped.items()}
        for name, sizes in stored.items():
            new = None if name.startswith(MODEL) else self._renamed(name)
            if new is None:
                continue
            if new in entries:
                raise PlanError(
                    f"'{entries[new].sources[0]}' and '{name}' both become '{new}'", fqn=name
                )
            entries[new] = MappedTensor.whole(name, sizes)
        self._resolved = stored, entries
        return entries

    def parameters(self, name: str, own: Set[str]) -> list[str]:
        """Returns what a stored parameter is called among `own`: nothing where it is left out,
        several names where it is split.

        REQUIRES: `resolve`.
        """
        found = self._reshaped.get(name) or [self._new.get(name, name)]
        return [self._among(new, own) for new in found if new is not None]

    def _among(self, new: str, own: Set[str]) -> str:
        if new in own or not self.wrappers:
            return new
        alike = [one for one in own if unwrapped(one) == unwrapped(new)]
        return alike[0] if len(alike) == 1 else new

    def _note(self, mapped: Mapping[str, MappedTensor], stored: Mapping[str, Sizes | None]) -> None:
        self._new = {name.removeprefix(MODEL): None for name in stored if name.startswith(MODEL)}
        for name, entry in mapped.items():
            sources = entry.sources
            if len(sources) == 1 and entry.is_whole(stored[sources[0]]):
                self._new[sources[0].removeprefix(MODEL)] = name
            else:
                for source in sources:
                    self._reshaped.setdefault(source.removeprefix(MODEL), []).append(name)

    def _renamed(self, name: str) -> str | None:
        """Returns the new name of what is no part of the model; None: it is left out."""
        prefix = next((one for one in self._prefixes if name.startswith(one)), None)
        if prefix is None:
            return name
        rest = name.removeprefix(prefix)
        old = self._owner(rest)
        if old is None:
            return name
        if old in self._reshaped:
            raise UnsupportedError(
                f"translate reshapes '{old}', of which the checkpoint holds the optimizer's "
                f"'{name}': nobody can split or merge that; rename only, or resume with "
                "load_optimizer=False"
            )
        new = self._new[old]
        return None if new is None else prefix + new + rest[len(old) :]

    def _owner(self, rest: str) -> str | None:
        """Returns the stored parameter whose name begins "PARAMETER.KEY"."""
        end = rest.find(".")
        while end >= 0:
            if rest[:end] in self._new:
                return rest[:end]
            end = rest.find(".", end + 1)
        return None


def checked_translate(translate: Any, model: Any) -> KeyRules | None:
    """Returns the rules of an argument, a KeyMap or a function of a name. Raises: OptionError."""
    if translate is not None and model is None:
        raise OptionError(
            "translate is for the names of a model, and no model is given",
            option="translate",
            value=None,
        )
    if translate is None or isinstance(translate, KeyRules):
        return translate
    if not callable(translate):
        raise OptionError(
            "translate must be a KeyMap, a function of a name, or None, got a "
            f"{type(translate).__name__}",
            option="translate",
            value=None,
        )
    return KeyMap(translate)
