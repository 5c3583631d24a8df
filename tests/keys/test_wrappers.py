"""Names without wrappers: by the modules themselves, and by words without ever losing one."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies
from torch import nn

from torch_dcpx import KeyMap, OptionError
from torch_dcpx.keys.mapped_state import matched
from torch_dcpx.keys.wrappers import WRAPPERS, plain_names, renamed, unwrapped

PARTS = strategies.sampled_from(["a", "w", "module", "_orig_mod"])
NAMES = strategies.lists(PARTS, min_size=1, max_size=4).map(".".join)
STATES = strategies.lists(NAMES, min_size=1, max_size=8, unique=True)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)
        self._orig_mod = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("wrap", "begin"),
    [(lambda module: module, ""), (nn.DataParallel, "module.")],
)
@pytest.mark.parametrize("key", ["", "model", "a.b"])
def test_a_module_says_which_components_are_wrappers(
    wrap: Callable[[nn.Module], nn.Module], begin: str, key: str
) -> None:
    model, first = wrap(Inner()), f"{key}." if key else ""
    names = [first + name for name in model.state_dict()]
    found = plain_names({key: model}, [*names, "module.of.another"] if key else names)
    assert found == {name: name.replace(first + begin, first, 1) for name in names}


@hypothesis.given(STATES)
def test_no_two_names_become_one(names: list[str]) -> None:
    for words in (WRAPPERS, frozenset({"_orig_mod"})):
        new = renamed(names, lambda name, words=words: unwrapped(name, words))  # type: ignore[misc]
        assert list(new) == names
        assert len(set(new.values())) == len(names)
        assert all(new.values())
    for wrappers in (None, True, False):
        entries = KeyMap(wrappers=wrappers).resolve(dict.fromkeys(names))
        assert sorted(entry.sources[0] for entry in entries.values()) == sorted(names)


@hypothesis.given(STATES, STATES)
def test_no_stored_name_is_meant_twice(stored: list[str], wanted: list[str]) -> None:
    for wrappers in (None, True, False):
        key_map = KeyMap(wrappers=wrappers)
        entries, meant = matched(key_map, dict.fromkeys(stored), wanted)
        assert len(set(meant.values())) == len(meant)
        for name, entry in meant.items():
            (source,) = entries[entry].sources
            assert unwrapped(name) == unwrapped(source)
            assert wrappers is not False or name == source


@hypothesis.given(STATES)
def test_a_state_means_itself_and_what_a_wrapper_made_of_it(names: list[str]) -> None:
    stored = dict.fromkeys(names)
    for begin in ("", "module.", "_orig_mod.", "module._orig_mod."):
        state = {begin + name: name for name in names}
        plain = {name: own for name, own in state.items() if begin}
        entries, meant = matched(KeyMap(), stored, state, plain=plain)
        assert {name: entries[one].sources[0] for name, one in meant.items()} == state
        entries, meant = matched(KeyMap(), dict.fromkeys(state), state)
        assert {name: entries[one].sources[0] for name, one in meant.items()} == {
            n: n for n in state
        }


def test_what_is_no_switch_is_refused() -> None:
    for wrappers in ("yes", 1, 0):
        with pytest.raises(OptionError, match="wrappers"):
            KeyMap(wrappers=wrappers)  # type: ignore[arg-type]
