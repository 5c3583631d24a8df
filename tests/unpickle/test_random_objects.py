"""Random generators in byte items: they come back as they were, or are refused before they draw."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.rows import check_rows
from support.zip_samples import saved

from torch_dcpx import CorruptionError, UnsafePickleError
from torch_dcpx.unpickle.byte_items import decode_byte_item

MAKE = np.random._pickle.__generator_ctor
BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


def decoded(value: Any) -> Any:
    return decode_byte_item(saved(value), fqn="k", path="file")


def used(name: str) -> Any:
    """Returns a generator from the middle of its life."""
    made = np.random.Generator(getattr(np.random, name)(np.random.SeedSequence([3, 5]).spawn(2)[1]))
    made.integers(0, 1 << 16, 7, dtype=np.uint16)
    return made


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_numpys_generator_goes_on_where_it_was(name: str) -> None:
    given = used(name)
    made = decoded({"g": given, "same": given})
    assert made["g"] is made["same"]
    assert made["g"].bit_generator.state.keys() == given.bit_generator.state.keys()
    assert (made["g"].integers(0, 1 << 62, 2000) == given.integers(0, 1 << 62, 2000)).all()
    spawned = [one.spawn(1)[0].random(4) for one in (made["g"], given)]
    assert (spawned[0] == spawned[1]).all()
    assert (decoded(given.bit_generator).random_raw(5) == given.bit_generator.random_raw(5)).all()


def test_numpys_old_generator_goes_on_where_it_was() -> None:
    given = np.random.RandomState(4)
    given.normal()  # keeps the second of a pair
    made = decoded(given)
    assert (made.normal(size=700) == given.normal(size=700)).all()


def test_generator_as_numpy_before_1_24_wrote_it() -> None:
    given = used("PCG64")
    made = decoded(Reduces(MAKE, ("PCG64",), given.bit_generator.state))
    assert (made.random(5) == given.random(5)).all()


def test_pythons_and_torchs_generators_go_on_where_they_were() -> None:
    ours = random.Random(3)
    ours.gauss(0, 1)
    made = decoded(ours)
    assert [made.gauss(0, 1) for _ in range(5)] == [ours.gauss(0, 1) for _ in range(5)]
    theirs = torch.Generator().manual_seed(-3)
    torch.randn(700, generator=theirs)
    again = decoded(theirs)
    assert again.initial_seed() == theirs.initial_seed()
    assert torch.equal(torch.randn(9, generator=again), torch.randn(9, generator=theirs))


class Reduces:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def bits_with(name: str, **changes: Any) -> Any:
    """Returns what pickles as a bit generator with a changed state."""
    make, args, (state, seeds) = getattr(np.random, name)(3).__reduce__()
    state = copy.deepcopy(state)
    for key, value in changes.items():
        inner = state["state"] if key in state["state"] else state
        assert key in inner
        inner[key] = value
    return Reduces(make, args, (state, seeds))


def seeds_with(at: int, value: Any) -> Any:
    make, args, state = np.random.SeedSequence(5).__reduce__()
    return Reduces(make, args, (*state[:at], value, *state[at + 1 :]))


def python_with(at: int, value: Any) -> Any:
    version, words, gauss = random.Random(3).getstate()
    return Reduces(random.Random, (), (version, (*words[:at], value, *words[at + 1 :]), gauss))


def torch_with(state: Any, seed: Any = 3) -> Any:
    return Reduces(torch.Generator, (torch.device("cpu"),), (seed, None, state))


BITS = np.random.PCG64(3).__reduce__()[:2]
TWISTER = torch.Generator().get_state()
HOSTILE = {
    "position beyond the twister's words": bits_with("MT19937", pos=625),
    "negative position": bits_with("MT19937", pos=-1),
    "position that is no int": bits_with("MT19937", pos=1.0),
    "too few words": bits_with("MT19937", key=np.zeros(3, np.uint32)),
    "words of another type": bits_with("MT19937", key=np.zeros(624, np.uint64)),
    "words that are a list": bits_with("MT19937", key=[0] * 624),
    "position beyond Philox's buffer": bits_with("Philox", buffer_pos=5),
    "short buffer": bits_with("Philox", buffer=np.zeros(3, np.uint64)),
    "number of more than 128 bits": bits_with("PCG64", state=1 << 128),
    "negative number": bits_with("PCG64DXSM", inc=-1),
    "state of another generator": bits_with("SFC64", bit_generator="PCG64"),
    "no state": Reduces(*BITS),
    "seeds that are none": Reduces(*BITS, (np.random.PCG64(3).state, 3)),
    "unknown bit generator": Reduces(np.random._pickle.__bit_generator_ctor, ("os.system",), {}),
    "generator of no bit generator": Reduces(MAKE, ([1],)),
    "generator by another function": Reduces(MAKE, ("PCG64", int)),
    "old generator without a gauss": Reduces(
        np.random._pickle.__randomstate_ctor, (np.random.MT19937(3),), np.random.MT19937(3).state
    ),
    "entropy from the machine": seeds_with(0, None),
    "entropy that takes long to cut": seeds_with(0, 1 << 5000),
    "negative entropy": seeds_with(0, -5),
    "very many seeds": seeds_with(0, [1] * 300),
    "negative count": seeds_with(1, -1),
    "another pool": seeds_with(2, np.zeros(4, np.uint32)),
    "pool that takes long to mix": seeds_with(3, 1 << 20),
    "key that is no tuple": seeds_with(4, [1]),
    "Python's with a word too large": python_with(0, 1 << 32),
    "Python's with a position too large": python_with(624, 625),
    "Python's with a word that is none": python_with(5, "a"),
    "Python's of arguments": Reduces(random.Random, (3,), random.Random(3).getstate()),
    "Python's without a state": Reduces(random.Random, ()),
    "torch's of a short state": torch_with(TWISTER[:-1]),
    "torch's of nothing but ones": torch_with(torch.full_like(TWISTER, 255)),
    "torch's of a seed that is none": torch_with(TWISTER, "3"),
    "torch's with a list as state": torch_with([0] * 5056),
}  # fmt: skip


def test_a_state_that_no_generator_has_is_refused() -> None:
    def check(value: Any) -> None:
        with pytest.raises(CorruptionError):
            decoded(value)

    check_rows(HOSTILE, check)


def test_generator_of_a_device_is_refused_by_name() -> None:
    state = Reduces(torch.Generator, (torch.device("cuda", 1),), (3, 0, torch.zeros(16).byte()))
    with pytest.raises(UnsafePickleError, match=r"torch.Generator of device 'cuda:1'.*get_state"):
        decoded(state)


def test_what_is_decoded_can_be_pickled_again() -> None:
    for value in (used("SFC64"), np.random.RandomState(3), random.Random(3), torch.Generator()):
        assert type(pickle.loads(pickle.dumps(decoded(value)))) is type(value)


def test_very_many_generators_of_one_state_are_refused() -> None:
    """25 kB of these made 12 MB, and a megabyte half a gigabyte."""
    for *build, state in (
        (random.Random, (), random.Random(3).getstate()),
        (torch.Generator, (torch.device("cpu"),), (3, None, TWISTER)),
        (*np.random.MT19937(3).__reduce__()[:2], np.random.MT19937(3).state),
    ):
        with pytest.raises(CorruptionError, match="makes far more by its calls than it has bytes"):
            decoded([Reduces(*build, state) for _ in range(2200)])


def test_seeds_that_take_long_to_mix_again_and_again_are_refused() -> None:
    long = np.random.SeedSequence([1 << 4095] * 250, pool_size=64)
    made, args, state = long.__reduce__()  # type: ignore[misc]
    assert (decoded(long).pool == long.pool).all()
    with pytest.raises(CorruptionError, match="makes far more by its calls than it has bytes"):
        decoded([Reduces(made, args, state) for _ in range(40)])
