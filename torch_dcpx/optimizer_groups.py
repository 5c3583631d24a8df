"""The groups of optimizers: which parameters they hold, and their settings by parameter.

A checkpoint keeps one value of a name. Groups are numbered, and a stage of a pipeline has others
under the same numbers: then each rank's settings are kept under the names of its parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_dcpx.errors import MismatchError
from torch_dcpx.manager_translate import TrainingRules

__all__ = [
    "NAMED_GROUPS",
    "digest_of_groups",
    "groups_by_parameter",
    "settings_by_parameter",
    "translated_groups",
]

NAMED_GROUPS = "optimizer.groups by parameter"  # in a manager's record

_PARAMS = "params"


def digest_of_groups(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bytes:
    """Returns a digest of the names of the parameters in each group; no collective is run."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        [names.get(id(parameter), "") for parameter in group[_PARAMS]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return hashlib.blake2b(repr(groups).encode(errors="surrogatepass"), digest_size=16).digest()


def settings_by_parameter(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the settings of groups by parameter; of a group without any nothing is kept.

    Tensors among them are copies: a load fills those of each parameter on their own.
    """
    return {
        name: {key: _own(value) for key, value in group.items() if key != _PARAMS}
        for group in groups
        for name in group[_PARAMS]
    }


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def groups_by_parameter(
    settings: Mapping[str, Mapping[str, Any]], own: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer that holds `own` parameters; none for one without any.

    Raises:
        MismatchError: what is one group now was saved with different settings.
    """
    groups: list[dict[str, Any]] = []
    for names in filter(None, own):
        first = settings[names[0]]
        for name in names:
            if settings[name] != first:
                raise MismatchError(
                    f"parameters '{names[0]}' and '{name}' are one group of the optimizer, and "
                    f"were saved with {dict(first)!r:.200} and {dict(settings[name])!r:.200}",
                    fqn=name,
                )
        groups.append({**first, _PARAMS: list(names)})
    return groups


def translated_groups(
    groups: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]], rules: TrainingRules
) -> list[dict[str, Any]]:
    """Returns stored groups with their parameters' new names."""
    names = frozenset(name for group in own for name in group)
    found = []
    for group in groups:
        new = [one for name in group[_PARAMS] for one in rules.parameters(name, names)]
        found.append({**group, _PARAMS: new})
    return found
