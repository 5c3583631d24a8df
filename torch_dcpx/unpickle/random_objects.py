"""Random generators of byte items: Python's, torch's and NumPy's.

Each is made by its public constructor, and takes a state of just the form that such a generator
has: NumPy's own setters believe positions, and read beyond their arrays.

    random          Random
    torch           Generator (of the CPU)
    numpy.random    Generator RandomState SeedSequence; PCG64 PCG64DXSM MT19937 Philox SFC64
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from torch_dcpx.errors import UnsafePickleError
from torch_dcpx.unpickle.settle import Settler, checked_args, never_called, no_more_than, refuse
from torch_dcpx.unpickle.stand_ins import EMPTY, GlobalTable, StandIn, StandInType, brief, stand_in

try:
    import numpy as np
except ImportError:  # optional: torch runs without it
    np = None  # type: ignore[assignment]

_WORDS = 624  # of a Mersenne twister
_BIT_GENERATORS = {
    "MT19937": "_mt19937",
    "PCG64": "_pcg64",
    "PCG64DXSM": "_pcg64",
    "Philox": "_philox",
    "SFC64": "_sfc64",
}
_MOST = {"pos": _WORDS, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1}  # in a state of NumPy's
_MOST |= {"uinteger": 2**32 - 1, "state": 2**128 - 1, "inc": 2**128 - 1}
_MAX_POOL = 64  # words of a seed's pool, which is mixed in as many rounds; 4 by default
_MAX_SEED_BITS = 4096
_MAX_SEEDS = 256

# Many generators may be made of one state, and each is saved again with a state of its own.
_GENERATOR_BYTES = 32 << 10  # of Python's, the largest: 625 ints, and the tuple of them
_MIX_BYTES = 8  # for a word of seeds, in each word of the pool


# ---- Python's and torch's -----------------------------------------------------------------------


def _python_random(raw: StandIn, settle: Settler) -> random.Random:
    no_more_than(raw, state=True)
    settle.charge(_GENERATOR_BYTES)
    checked_args(raw, raw.args)
    state: tuple[Any, ...] = settle(raw.state) if type(raw.state) is tuple else ()
    version, words, gauss = state if len(state) == 3 else (None, None, None)
    if type(words) is not tuple or len(words) != _WORDS + 1 or type(version) is not int:
        refuse("has a random.Random without its state")
    most = [2**32 - 1] * _WORDS + [_WORDS]
    if any(type(n) is not int or not 0 <= n <= m for n, m in zip(words, most, strict=True)):
        refuse("has a random.Random with words that it cannot have")
    if type(gauss) not in (float, type(None)):
        refuse(f"has a random.Random with a {type(gauss).__name__}")
    made = random.Random()  # noqa: S311  (what was saved)
    made.setstate(state)
    return made


def _torch_generator(raw: StandIn, settle: Settler) -> torch.Generator:
    no_more_than(raw, state=True)
    settle.charge(_GENERATOR_BYTES)
    (device,) = checked_args(raw, settle(raw.args), torch.device)
    if device.type != "cpu":
        raise UnsafePickleError(
            f"refuse to rebuild a torch.Generator of device '{device}': save its get_state()",
            global_name=raw.global_name,
        )
    seed, offset, state = settle(raw.state) if type(raw.state) is tuple else (None,) * 3
    if type(seed) is not int or offset is not None or type(state) is not torch.Tensor:
        refuse("has a torch.Generator without its seed and state")
    made = torch.Generator(device)
    made.manual_seed(seed)
    made.set_state(state)  # which checks the size and the positions in it
    return made


# ---- NumPy's ------------------------------------------------------------------------------------


def _check_like(given: Any, own: Any, name: str) -> None:
    """Refuses a part of a state that has not the form of a generator's own."""
    if type(given) is not type(own):
        refuse(f"has a NumPy generator whose {name} is a {type(given).__name__}")
    if type(own) is dict:
        if given.keys() != own.keys():
            refuse(f"has a NumPy generator whose {name} has other parts")
        for key, value in own.items():
            _check_like(given[key], value, key)
    elif type(own) is int:
        if not 0 <= given <= _MOST[name]:
            refuse(f"has a NumPy generator whose {name} is {brief(given)}")
    elif type(own) is str:
        if given != own:
            refuse(f"has a NumPy generator whose {name} is {brief(given)}")
    elif type(own) is not float and (given.dtype, given.shape) != (own.dtype, own.shape):
        refuse(f"has a NumPy generator whose {name} is of {given.dtype} {given.shape}")


def _set_state(made: Any, state: Any) -> None:
    _check_like(state, made.state, "state of a bit generator")
    made.state = state


def _bit_generator(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw, state=True)
    settle.charge(_GENERATOR_BYTES)
    which: Any = raw.args[0] if len(raw.args) == 1 else None
    names = {name: name for name in _BIT_GENERATORS}
    names |= {RANDOM[f"numpy.random.{home}", n]: n for n, home in _BIT_GENERATORS.items()}
    name = names.get(which) if type(which) in (str, StandInType) else None
    if name is None:
        refuse(f"makes a NumPy generator of {brief(which)}")
    state, seeds = settle(raw.state), None
    if type(state) is tuple and len(state) == 2:  # from NumPy 2.0 on
        state, seeds = state
    if type(seeds) not in (type(None), np.random.SeedSequence):
        refuse(f"seeds a NumPy generator with a {type(seeds).__name__}")
    made = getattr(np.random, name)(0 if seeds is None else seeds)
    _set_state(made, state)
    return made


def _its_bit_generator(raw: StandIn, settle: Settler) -> Any:
    """Returns the first argument, which is one, or its name in NumPy before 1.24."""
    which, *constructors = raw.args or ("MT19937",)
    known = RANDOM["numpy.random._pickle", "__bit_generator_ctor"]
    if any(one is not known for one in constructors):
        refuse("makes a NumPy generator by another function than NumPy's")
    if type(which) is str and which in _BIT_GENERATORS:
        return getattr(np.random, which)(0)
    which = settle(which)
    if not isinstance(which, np.random.BitGenerator):
        refuse(f"makes a NumPy generator of {brief(which)}")
    return which


def _generator(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw, state=True)
    settle.charge(_GENERATOR_BYTES)
    made = np.random.Generator(_its_bit_generator(raw, settle))
    if raw.state is not EMPTY and raw.state is not None:
        _set_state(made.bit_generator, settle(raw.state))
    return made


def _random_state(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw, state=True)
    settle.charge(_GENERATOR_BYTES)
    made = np.random.RandomState(_its_bit_generator(raw, settle))
    state = settle(raw.state)
    _check_like(state, made.get_state(legacy=False), "state")
    made.set_state(state)
    return made


def _is_seed(value: Any) -> bool:
    return type(value) is int and value >= 0 and value.bit_length() <= _MAX_SEED_BITS


def _seed_sequence(raw: StandIn, settle: Settler) -> Any:
    no_more_than(raw, state=True)
    cls, checksum, rest = raw.args if len(raw.args) == 3 else (None, None, None)
    state = settle(raw.state)
    if (
        cls is not RANDOM["numpy.random.bit_generator", "SeedSequence"]
        or type(checksum) is not int
        or rest is not None
        or type(state) is not tuple
        or len(state) != 5
    ):
        refuse("has a NumPy SeedSequence of unknown parts")
    entropy, spawned, pool, pool_size, spawn_key = state
    seeds = entropy if type(entropy) in (list, tuple) else [entropy]
    if type(spawn_key) is not tuple or len(spawn_key) + len(seeds) > _MAX_SEEDS:
        refuse("has a NumPy SeedSequence of unknown or too many seeds")
    if not all(map(_is_seed, (*seeds, *spawn_key, spawned))):
        refuse("has a NumPy SeedSequence of seeds that are no numbers")
    if type(pool_size) is not int or not 4 <= pool_size <= _MAX_POOL:
        refuse(f"has a NumPy SeedSequence with a pool of {brief(pool_size)}")
    words = sum([one.bit_length() // 32 + 1 for one in (*seeds, *spawn_key)])
    settle.charge(_MIX_BYTES * pool_size * (words + pool_size))
    made = np.random.SeedSequence(
        entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned
    )
    if type(pool) is not np.ndarray or pool.shape != made.pool.shape or (pool != made.pool).any():
        refuse("has a NumPy SeedSequence whose pool is not that of its seeds")
    return made


def _table() -> GlobalTable:
    builds: dict[tuple[str, str], Callable[[StandIn, Settler], Any]] = {
        ("random", "Random"): _python_random,
        ("torch._C", "Generator"): _torch_generator,
    }
    if np is not None:
        of_bits, pickles = "numpy.random.bit_generator", "numpy.random._pickle"
        builds[of_bits, "SeedSequence"] = never_called
        builds[of_bits, "__pyx_unpickle_SeedSequence"] = _seed_sequence
        builds[pickles, "__bit_generator_ctor"] = _bit_generator
        builds[pickles, "__generator_ctor"] = _generator
        builds[pickles, "__randomstate_ctor"] = _random_state
        for name, home in _BIT_GENERATORS.items():
            builds[f"numpy.random.{home}", name] = never_called
    return {key: stand_in(".".join(key), build) for key, build in builds.items()}


RANDOM: GlobalTable = _table()
