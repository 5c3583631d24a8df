"""`RestrictedUnpickler`: names from exact tables, stand-ins that do nothing, typed errors."""

from __future__ import annotations

import collections
import contextlib
import gc
import pickle
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from hostile import pickles as hp
from support.rows import check_rows

from torch_dcpx.errors import CorruptionError, OptionError, UnsafePickleError
from torch_dcpx.metadata.stock_classes import METADATA
from torch_dcpx.unpickle.byte_items import OBJECTS
from torch_dcpx.unpickle.settle import Settler, build_user_object
from torch_dcpx.unpickle.stand_ins import StandInType, with_python2_names
from torch_dcpx.unpickle.unpickler import RestrictedUnpickler, malformed_is_corruption, user_globals

TABLES = {"metadata": METADATA, "objects": OBJECTS}


def decode(data: bytes, table=OBJECTS):
    """What both readers do: unpickle into stand-ins, then settle."""
    with malformed_is_corruption("decode", path="p", fqn="k"):
        return Settler()(RestrictedUnpickler(data, table, path="p", fqn="k").load())


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_global_outside_the_table_is_named_and_nothing_runs(table: Any) -> None:
    def check(row: tuple[bytes, str]) -> None:
        body, global_name = row
        with hp.watched(), pytest.raises(CorruptionError) as caught:
            decode(hp.document(body), table)
        error = caught.value
        if table is METADATA and "argparse" in str(error):  # asked for first, and not there either
            global_name = "argparse.Namespace"
        assert type(error) is UnsafePickleError
        assert (error.global_name, error.path, error.fqn) == (global_name, "p", "k")

    check_rows(hp.REFUSED, check)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_allowed_names_cannot_be_bent(table: Any) -> None:
    def check(body: bytes) -> None:
        with hp.watched(), pytest.raises(CorruptionError) as caught:
            decode(hp.document(body), table)
        assert (caught.value.path, caught.value.fqn) == ("p", "k")

    check_rows(hp.CORRUPT, check)


def test_bombs_are_found_by_the_scan_before_the_unpickler_starts() -> None:
    for bomb in ("memo bomb", "giant bytearray opcode", "giant frame", "giant bytes opcode", "deep",
                 "deep lists", "extension registry", "out-of-band buffer"):  # fmt: skip
        with pytest.raises(CorruptionError) as caught:
            RestrictedUnpickler(hp.document(hp.CORRUPT[bomb]), OBJECTS, path="p", fqn="k")
        assert caught.value.offset is not None, bomb  # only the scanner knows
        assert (caught.value.path, caught.value.fqn) == ("p", "k")


@pytest.mark.parametrize("cls", ["set", "frozenset"])
def test_tuples_that_unfold_without_end_are_not_hashed(cls):
    tower = b"N\x85" + b"2\x86" * 60
    with pytest.raises(CorruptionError):
        decode(hp.document(hp.call(hp.name("builtins", cls), b"]" + tower + b"a")))


def test_message_says_how_to_allow_the_global():
    with pytest.raises(UnsafePickleError) as caught:
        decode(hp.document(hp.name("os", "system")))
    message = str(caught.value)
    assert 'safe_globals=["os.system"]' in message
    assert "trusted=True" in message
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.global_name, copy.fqn) == ("os.system", "k")


def test_every_table_entry_is_inert():
    for table in TABLES.values():
        for (module, name), entry in table.items():
            is_stand_in = type(entry) is StandInType
            assert is_stand_in or not callable(entry) or (module, name) == ("torch", "Size")
            if is_stand_in:
                with pytest.raises(pickle.UnpicklingError):
                    entry.__init__ = None
                with pytest.raises(pickle.UnpicklingError):
                    del entry.__init__


def test_python2_names_are_the_same_entries():
    table = with_python2_names({("builtins", "range"): 1, ("copyreg", "x"): 2, ("a", "b"): 3})
    assert table == {
        ("builtins", "range"): 1,
        ("__builtin__", "range"): 1,
        ("__builtin__", "xrange"): 1,
        ("copyreg", "x"): 2,
        ("copy_reg", "x"): 2,
        ("a", "b"): 3,
    }


def test_a_dict_of_modules_does_not_match_dotted_names():
    table = user_globals([collections.OrderedDict], build_user_object)
    for module, name in (("collections.OrderedDict", "keys"), ("", "collections.OrderedDict")):
        with pytest.raises(UnsafePickleError):
            decode(hp.document(hp.stack_name(module, name)), table)


@pytest.mark.parametrize("entry", [3, None, object()])
def test_safe_globals_must_have_a_name(entry):
    with pytest.raises(OptionError) as caught:
        user_globals([entry], build_user_object)
    assert caught.value.option == "safe_globals"


HOLDERS = [
    hp.new(hp.NAMESPACE),
    hp.call(hp.ORDERED),
    hp.call(hp.name("types", "SimpleNamespace")),
    hp.call(hp.name("collections", "Counter")),
]


def test_planted_attribute_is_refused_by_name() -> None:
    for planted in ("__reduce_ex__", "__module__", "__class__", "__dict__"):
        for holder in HOLDERS:
            with hp.watched(), pytest.raises(CorruptionError, match=planted):
                decode(hp.document(hp.state(holder, hp.value({planted: "os"}))))
            with hp.watched(), pytest.raises(CorruptionError):
                decode(hp.document(hp.state(holder, hp.slots(**{planted: "os"}))))


def test_attribute_that_shadows_a_method_is_refused():
    body = hp.state(hp.call(hp.ORDERED), hp.value({"items": 1}))
    with pytest.raises(CorruptionError, match="items"):
        decode(hp.document(body))


def test_second_build_cannot_call_a_planted_setstate():
    planted = hp.state(hp.new(hp.NAMESPACE), hp.value({"__setstate__": 1}))
    with hp.watched(), pytest.raises(CorruptionError):
        decode(hp.document(hp.state(planted, hp.value({"a": 1}))))


def test_cycles_and_shared_objects_are_kept():
    loop: list = [{}]
    loop[0]["again"] = loop
    shared = [1]
    got = decode(pickle.dumps({"loop": loop, "a": shared, "b": (shared, shared)}, protocol=2))
    assert got["loop"][0]["again"] is got["loop"]
    assert got["a"] is got["b"][0] is got["b"][1]


def test_nesting_that_torch_save_can_write_is_read():
    deep: list = []
    for _ in range(300):
        deep = [deep]
    assert decode(pickle.dumps(deep, protocol=2)) == deep


def test_collector_is_left_as_it_was():
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            decode(pickle.dumps([1], protocol=2))
            with pytest.raises(CorruptionError):
                decode(b"\xff")
            assert gc.isenabled() is was_enabled
        finally:
            gc.enable()


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_a_corruption_error(data):
    with hp.watched(), contextlib.suppress(CorruptionError):
        decode(data)


@hypothesis.given(st.data())
def test_mutated_pickles_give_an_object_or_a_corruption_error(data):
    bodies = [*[b for b, _ in hp.REFUSED.values()], *list(hp.CORRUPT.values())[:16]]
    body = bytearray(hp.document(data.draw(st.sampled_from(bodies))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with hp.watched(), contextlib.suppress(CorruptionError):
        decode(bytes(body))
