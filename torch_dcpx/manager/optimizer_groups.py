"""The groups of optimizers: which parameters they hold, and their settings by parameter.

A checkpoint keeps one value of a name. Groups are numbered, and a stage of a pipeline has others
under the same numbers: then each rank's settings are kept under the names of its parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_dcpx.errors import MismatchError
from torch_dcpx.manager.translate import TrainingRules

NAMED_GROUPS = "optimizer.groups by parameter"  # in a manager's record
CLASSES = "optimizer_classes"  # beneath a manager's own items

_PARAMS = "params"
_OF_SCHEDULERS = (
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
)  # what these begin with, they and wrappers add to groups


def digest_of_groups(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bytes:
    """Returns a digest of the names of the parameters in each group; no collective is run."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        [names.get(id(parameter), "") for parameter in group[_PARAMS]]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return hashlib.blake2b(repr(groups).encode(errors="surrogatepass"), digest_size=16).digest()


def classes_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Returns the names of classes, as keys: items of several ranks with one name become one."""
    return {type(one).__name__: "" for one in optimizers}


def check_classes(
    name: str,
    optimizers: Sequence[torch.optim.Optimizer],
    stored: Iterable[str],
    settings: Iterable[str],
) -> None:
    """Refuses what another class of optimizer saved.

    A class of another name may go on where it has every setting that was saved: AdamW from Adam, a
    subclass, a wrapper. Where no class was saved, nothing is refused.

    Args:
        name: of the optimizer, for the message.
        optimizers: those that are kept as one.
        stored: names of all items of the checkpoint.
        settings: names of settings that the checkpoint holds for their groups.

    Raises:
        MismatchError: the class is another one, and so are the settings.
    """
    prefix = f"dcpx.{CLASSES}.{name}."
    saved = {item[len(prefix) :] for item in stored if item.startswith(prefix)}
    saved = {one for one in saved if "." not in one}  # else of another, whose name begins so
    own = set(classes_of(optimizers))
    if not saved or own <= saved:
        return
    known = {key for one in optimizers for group in one.param_groups for key in group}
    strange = {key for key in settings if not key.startswith(_OF_SCHEDULERS)} - known
    if strange:
        which = f"the optimizer '{name}'" if name else "the optimizer"
        raise MismatchError(
            f"{which} is {_listed(own)}, and {_listed(saved)} was saved, which has the settings "
            f"{_listed(strange)} besides; load_optimizer=False leaves it as it is, strict=False "
            "takes what there is",
            fqn=name or "optimizer",
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


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


def check_sources(groups: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> None:
    """Looks at settings that several of the stored groups of one group's parameters have.

    Raises:
        MismatchError: what is one group now was saved with different settings.
    """
    owners = {name: group for group in groups for name in group[_PARAMS]}
    for at, names in enumerate(own):
        known = [name for name in names if name in owners]
        for name in known:
            first, other = owners[known[0]], owners[name]
            both = [key for key in first if key in other and key not in (_PARAMS, "param_names")]
            for key in both if first is not other else ():
                if not _is_same(first[key], other[key]):
                    raise MismatchError(
                        f"parameters '{known[0]}' and '{name}' are one group of the optimizer "
                        f"({at}), and were saved with {key}={first[key]!r:.80} and "
                        f"{key}={other[key]!r:.80}; strict=False takes those of the last group",
                        fqn=name,
                    )


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or bool(a == b)


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
