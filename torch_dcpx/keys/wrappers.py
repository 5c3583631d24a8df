"""The components that wrappers put into names: known by the modules, or by the words.

torch alone uses the words `_orig_mod`, `_checkpoint_wrapped_module` and `_fsdp_wrapped_module`.
`module`, which DDP and DataParallel put there, is also what users call a submodule: where no
module is at hand, it is a wrapper's only if the caller says so.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from torch import nn

MODULE = "module"
PRIVATE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
WRAPPERS = PRIVATE | {MODULE}

# Where torch defines each class of wrappers, and the component that it adds.
_CLASSES = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", MODULE),
    ("torch.nn.parallel.data_parallel", "DataParallel", MODULE),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def has_words(names: Iterable[str]) -> bool:
    """Returns whether a wrapper's word may be in any name; searches one text of all names."""
    text = "\n".join(map(str, names))
    return any(word in text for word in WRAPPERS)


def unwrapped(name: str, words: frozenset[str] = WRAPPERS) -> str:
    """Returns a name without the components that are one of these words."""
    if not any(word in name for word in words):
        return name
    return ".".join(part for part in name.split(".") if part not in words)


def renamed(names: Iterable[str], new_name: Callable[[str], str]) -> dict[str, str]:
    """Returns the new names of names; where two would meet, or none would be left, their own."""
    new = {name: new_name(name) for name in names}
    counts = Counter(new.values())
    kept = {name: (one if one and counts[one] == 1 else name) for name, one in new.items()}
    return kept if len(set(kept.values())) == len(kept) else {name: name for name in new}


def plain_names(modules: Mapping[str, nn.Module], names: Iterable[str]) -> dict[str, str]:
    """Returns names without the components that the modules themselves say are wrappers'.

    Args:
        modules: by the key that they have in the state; "" for the state of one module.
        names: of the flattened state.

    Returns:
        Only names of these modules that have a wrapper's word in them, changed or not.
    """
    found: dict[str, str] = {}
    with_words = [name for name in names if any(word in name for word in WRAPPERS)]
    for key, module in modules.items() if with_words else ():
        begin, words = f"{key}." if key else "", _Words()
        for name in with_words:
            if name.startswith(begin):
                found[name] = begin + _plain_name(module, name.removeprefix(begin), words)
    return found


def inside(model: nn.Module) -> nn.Module:
    """Returns the module in DDP and torch.compile: its state has the plain names by itself."""
    words = _Words()
    while words.of(model) in ("_orig_mod", MODULE) and not isinstance(model, nn.DataParallel):
        model = model.get_submodule(words.of(model))
    return model


def has_crossed_names(model: nn.Module) -> bool:
    """Returns whether a name of the state, without wrappers, is that of another one with them.

    Not with FSDP1, whose names DCP alone knows.
    """
    words = _Words()
    if any(words.of(one) == "_fsdp_wrapped_module" for one in model.modules()):
        return False
    tensors = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    names = {name for name, _ in tensors}
    plain = plain_names({"": model}, names)
    return any(new != name and new in names for name, new in plain.items())


class _Words:
    """The component that each class of modules adds to names; "" if it is no wrapper."""

    def __init__(self) -> None:
        # A class whose module nobody has imported has no instances.
        found = ((getattr(sys.modules.get(at), name, None), word) for at, name, word in _CLASSES)
        self._classes = [(one, word) for one, word in found if one is not None]
        self._of_types: dict[type, str] = {}

    def of(self, module: nn.Module | None) -> str:
        kind = type(module)
        if kind not in self._of_types:
            words = (word for one, word in self._classes if issubclass(kind, one))
            self._of_types[kind] = next(words, "")
        return self._of_types[kind]


def _plain_name(module: nn.Module, name: str, words: _Words) -> str:
    """Returns a name of the module's state without the components of wrappers."""
    kept = []
    here: nn.Module | None = module
    for part in name.split("."):
        while here is not None and (word := words.of(here)) and word != part:
            here = here._modules.get(word)  # FSDP1 and checkpoint_wrapper leave it out themselves
        if not words.of(here):
            kept.append(part)
        here = here._modules.get(part) if here is not None else None
    return ".".join(kept)
