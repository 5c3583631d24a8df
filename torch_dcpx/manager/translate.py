"""`resume(translate=)`: a KeyMap for the stored model, and the optimizers' names along with it.

1. Rules see the model's names without "model.", as in `load_pretrained` and `export`.
2. A parameter gets its new name also in its group and for its optimizer's state.
3. All other parts keep their names.

A checkpoint keeps one value of a name, and the name of a group is its number. Where ranks have
other groups under one number (stages of a pipeline), a save keeps settings by parameter.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from torch_dcpx._text import counted
from torch_dcpx.errors import MismatchError, OptionError, PlanError, UnsupportedError
from torch_dcpx.keys.key_map import KeyMap
from torch_dcpx.keys.mapped_state import matched
from torch_dcpx.keys.mapped_tensor import MappedTensor, Sizes
from torch_dcpx.keys.wrappers import inside, plain_names

_V = TypeVar("_V")

MODEL = "model."
OPTIMIZER = "optimizer."

logger = logging.getLogger("torch_dcpx")


class TrainingRules(KeyMap):
    """The rules of one resume. Belongs to one load. Not thread-safe."""

    def __init__(self, key_map: KeyMap, owners: Iterable[str], *, has_named_groups: bool) -> None:
        """Translates the model as `key_map` does, and optimizers' states, beneath `owners_of`.

        With `has_named_groups` the settings of groups are stored by parameter.
        """
        super().__init__(*key_map.rules, wrappers=key_map.wrappers)
        self._key_map = key_map
        self.own: Collection[str] = ()  # the model's names, once its part has given its state
        kinds = ("state.", "param_groups.") if has_named_groups else ("state.",)
        self._prefixes = tuple(owner + kind for owner in owners for kind in kinds)
        self._new: dict[str, str | None] = {}  # by stored name; None: left out
        self._reshaped: dict[str, list[str | None]] = {}  # names made of a stored one
        # The last `stored` and its entries: parts and planner resolve, functions run once.
        self._resolved: tuple[Mapping[str, Sizes | None], dict[str, MappedTensor]] | None = None

    def resolve(self, stored: Mapping[str, Sizes | None], **_: Any) -> dict[str, MappedTensor]:
        """Returns the entries of all parts by their new names.

        Raises as the KeyMap. PlanError: an optimizer would have two entries of one name.
        UnsupportedError: an optimizer has states of a reshaped tensor.
        """
        if self._resolved is not None and self._resolved[0] == stored:
            return self._resolved[1]
        entries, meant = matched(self._key_map, stored, self.own, part=MODEL)
        mapped = {name: entries[one] for name, one in meant.items()}
        taken = frozenset(meant.values())
        for name, entry in entries.items():
            if name not in taken:
                mapped.setdefault(name, entry)
        self._new = {name.removeprefix(MODEL): None for name in stored if name.startswith(MODEL)}
        for name, entry in mapped.items():
            old = [source.removeprefix(MODEL) for source in entry.sources]
            if len(old) == 1 and entry.is_whole(stored[entry.sources[0]]):
                self._new[old[0]] = name
            elif entry.sizes is None or 0 not in entry.sizes:  # else no element is elsewhere
                for source in old:
                    self._reshaped.setdefault(source, []).append(name)
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

    def parameters(self, name: str) -> list[str]:
        """Returns the new names of a stored parameter, of which a split makes several.

        REQUIRES: `resolve`.
        """
        found = self._reshaped.get(name) or [self._new.get(name, name)]
        return [new for new in found if new is not None]

    def leaves_out(self, name: str) -> bool:
        """Returns whether no new name comes of a stored one. REQUIRES: `resolve`."""
        if not name.startswith(MODEL):
            return self._renamed(name) is None
        old = name.removeprefix(MODEL)
        return self._new.get(old, old) is None and old not in self._reshaped

    def _renamed(self, name: str) -> str | None:
        """Returns the new name of an item outside the model; None: it is left out."""
        prefix = next((one for one in self._prefixes if name.startswith(one)), "")
        rest = name.removeprefix(prefix)
        old = owner_of(rest, self._new) if prefix else None
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


def owner_of(name: str, *known: Collection[str]) -> str | None:
    """Returns the parameter that "PARAMETER.KEY" begins with."""
    end = name.find(".")
    while end >= 0:
        if any(name[:end] in names for names in known):
            return name[:end]
        end = name.find(".", end + 1)
    return None


def beneath(prefix: str, names: Iterable[tuple[str, _V]]) -> dict[str, _V]:
    """Returns the pairs whose names begin with a prefix, without it."""
    begin = len(prefix)
    return {name[begin:]: value for name, value in names if name.startswith(prefix)}


def checked_translate(translate: Any, model: Any) -> KeyMap | None:
    """Returns the rules of an argument, a KeyMap or a function of a name. Raises: OptionError."""
    if translate is not None and model is None:
        problem = "translate is for the names of a model, and no model is given"
    elif translate is None or isinstance(translate, KeyMap):
        return translate
    elif callable(translate):
        return KeyMap(translate)
    else:
        kind = type(translate).__name__
        problem = f"translate must be a KeyMap, a function of a name, or None, got a {kind}"
    raise OptionError(problem, option="translate")


# ---- Optimizers, and their groups ----------------------------------------------------------------


NAMED_GROUPS = "optimizer.groups by parameter"  # in a manager's record
CLASSES = "optimizer_classes"  # beneath a manager's own items

_PARAMS, _NAMES = "params", "param_names"
# Schedulers and wrappers add settings to groups whose names begin so.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


def flat(parts: Any) -> Sequence[Any]:
    """Returns one part, or those in a list or dict, one after the other; none of None."""
    if isinstance(parts, Mapping):
        return list(parts.values())
    alone = () if parts is None else (parts,)
    return parts if isinstance(parts, (list, tuple)) else alone


def kind_of(part: Any) -> str:
    """Returns the sort of a part, for all ranks to compare."""
    if isinstance(part, Mapping):
        return f"a dict of {', '.join(map(str, part))}"
    if isinstance(part, (list, tuple)):
        return f"a list of {len(part)}"
    return "one"


def by_name(optimizers: Any) -> Mapping[str, Any]:
    """Returns optimizers by their names; one, and a list of them, under ""."""
    return optimizers if isinstance(optimizers, Mapping) else {"": optimizers}


def owners_of(optimizers: Any) -> list[str]:
    """Returns the beginning of each optimizer's stored names; none of None."""
    if isinstance(optimizers, Mapping):
        return [f"{OPTIMIZER}{name}." for name in optimizers]
    return [] if optimizers is None else [OPTIMIZER]


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.nn.Parameter]:
    """Returns the parameters of optimizers, group by group."""
    return (p for one in optimizers for group in one.param_groups for p in group["params"])


def group_digest(model: Any, optimizers: Any) -> bytes:
    """Returns a digest of the names in each group, without a collective; b"" of no optimizer."""
    if optimizers is None:
        return b""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [
        [names.get(id(parameter), "") for parameter in group[_PARAMS]]
        for optimizer in flat(optimizers)
        for group in optimizer.param_groups
    ]
    return hashlib.blake2b(repr(groups).encode(errors="surrogatepass"), digest_size=16).digest()


def classes_of(optimizers: Any) -> dict[str, str]:
    """Returns the names of classes, as keys: items of several ranks with one name become one."""
    return {type(one).__name__: "" for one in flat(optimizers)}


def check_classes(
    name: str,
    optimizers: Sequence[torch.optim.Optimizer],
    stored: Iterable[str],
    settings: Iterable[str],
) -> bool:
    """Returns whether these classes were saved.

    Raises MismatchError where another was, with `settings` that these have not. Others may go on:
    AdamW from Adam, a subclass, a wrapper; and every class where none was saved.
    """
    begin = f"dcpx.{CLASSES}.{name}"
    owners = (item.rpartition(".") for item in stored if item.startswith(begin))
    saved = {kind for owner, _, kind in owners if owner == begin}
    own = set(classes_of(optimizers))
    if not saved or own <= saved:
        return bool(saved)
    known = {key for one in optimizers for group in one.param_groups for key in group}
    strange = {key for key in settings if not key.startswith(_OF_SCHEDULERS)} - known
    if strange:
        which = f"the optimizer '{name}'" if name != "" else "the optimizer"
        raise MismatchError(
            f"{which} is {_listed(own)}, and {_listed(saved)} was saved, which has the settings "
            f"{_listed(strange)} besides; load_optimizer=False leaves it as it is, strict=False "
            "takes what there is",
            fqn=str(name) or "optimizer",
        )
    return False


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def settings_by_parameter(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the settings of groups by parameter; tensors are copies, for a load fills each."""
    return {
        name: {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != _PARAMS
        }
        for group in groups
        for name in group[_PARAMS]
    }


def groups_by_parameter(
    settings: Mapping[str, Mapping[str, Any]], own: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Returns the groups of `own` parameters. Raises MismatchError: settings of one differ."""
    groups: list[dict[str, Any]] = []
    for names in filter(None, own):
        first = settings[names[0]]
        for name in names:
            if not _is_same({**settings[name], _NAMES: ()}, {**first, _NAMES: ()}):
                raise MismatchError(
                    f"parameters '{names[0]}' and '{name}' are one group of the optimizer, and "
                    f"were saved with {dict(first)!r:.200} and {dict(settings[name])!r:.200}",
                    fqn=name,
                )
        groups.append({**first, _PARAMS: list(names)})
    return groups


def check_sources(groups: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> None:
    """Raises MismatchError: stored groups of one group's parameters differ in a setting."""
    owners = {name: group for group in groups for name in group[_PARAMS]}
    for at, names in enumerate(own):
        known = [name for name in names if name in owners]
        for name in known:
            first, other = owners[known[0]], owners[name]
            both = [key for key in first if key in other and key not in (_PARAMS, _NAMES)]
            for key in both if first is not other else ():
                if not _is_same(first[key], other[key]):
                    raise MismatchError(
                        f"parameters '{known[0]}' and '{name}' are one group of the optimizer "
                        f"({at}), and were saved with {key}={first[key]!r:.80} and "
                        f"{key}={other[key]!r:.80}; strict=False takes those of the last one whose "
                        f"number is below {len(own)}",
                        fqn=name,
                    )


def check_taken(
    groups: Mapping[int, Mapping[str, Any]],
    bare: Collection[int],
    own: Sequence[Sequence[str]],
    begin: str,
    model: torch.nn.Module | None,
    may_miss: Callable[[str], object],
) -> None:
    """Raises MismatchError: what stored groups had is in no group now, and may not be left out.

    Args:
        groups: the stored ones, by place.
        bare: places of those that were saved without parameters.
        begin: of the optimizer's stored names.
        model: others than its trained parameters need no group. None: all need one.
    """
    here = {name for names in own for name in names}
    gone = {name: at for at, group in groups.items() for name in group[_PARAMS] if name not in here}
    trained = _trained(model) if gone and model is not None else gone.keys()
    left = {f"{begin}state.{name}": at for name, at in gone.items() if name in trained}
    for at in sorted(set(bare) & groups.keys()):
        if at >= len(own) or own[at]:
            left[f"{begin}param_groups.{at}"] = at
    owed = [
        name
        for name, at in left.items()
        if not may_miss(name) and not may_miss(f"{begin}param_groups.{at}.{_PARAMS}")
    ]
    if owed:
        raise MismatchError(
            f"{counted(len(owed), 'parameter or group', 'parameters or groups')} of the optimizer "
            f"that was saved {'is' if len(owed) == 1 else 'are'} in none of its groups now: "
            f"{', '.join(map(repr, owed[:5]))}; add_param_group before the resume takes them; "
            "strict=False, or allow_missing=[globs], leaves them out; load_optimizer=False leaves "
            "the whole optimizer",
            fqn=owed[0],
            left=tuple(owed),
        )


def _trained(model: torch.nn.Module) -> set[str]:
    """Returns the names of the parameters that are trained, as DCP has them."""
    plain = inside(model)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    names = plain_names({"": plain}, parameters)
    return {names.get(name, name) for name, one in parameters.items() if one.requires_grad}


def check_places(
    groups: Mapping[int, Mapping[str, Any]],
    own: Sequence[Sequence[str]],
    timed: Collection[int],
    *,
    is_strict: bool,
) -> None:
    """Raises MismatchError, or warns if not strict: a scheduler has rates of groups by their
    places, and its groups stand elsewhere now.

    Args:
        groups: the stored ones, by place.
        timed: places of the groups that have a scheduler.
    """
    owners = {name: at for at, group in groups.items() for name in group[_PARAMS]}
    moved = {
        (at, owners[name]): name
        for at, names in enumerate(own)
        for name in reversed(names)
        if at in timed and owners.get(name, at) != at
    }
    if not moved:
        return
    shown = [f"{name!r:.80} is in group {at} and was in {was}" for (at, was), name in moved.items()]
    problem = (
        "the optimizer's groups stand elsewhere than they were saved, and its scheduler has rates "
        f"by their places: {', '.join(shown[:5])}; make the groups in the saved order"
    )
    if is_strict:
        raise MismatchError(
            f"{problem}; strict=False resumes all the same, load_optimizer=False leaves both",
            fqn=next(iter(moved.values())),
        )
    logger.warning("resumed, but %s", problem)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    return a is b or bool(a == b)


def translated_groups(
    groups: Sequence[Mapping[str, Any]], rules: TrainingRules
) -> list[dict[str, Any]]:
    """Returns stored groups with their parameters' new names."""
    return [
        {**g, _PARAMS: [new for name in g[_PARAMS] for new in rules.parameters(name)]}
        for g in groups
    ]
