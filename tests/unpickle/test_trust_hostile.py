"""Hostile byte items: refused with the item's name, nothing run, nothing read past its bytes."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import subprocess
import sys
import zipfile

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hostile import pickles as hp
from support.rows import check_rows
from support.zip_samples import saved

from torch_dcpx.errors import CorruptionError, UnsafePickleError
from torch_dcpx.unpickle.byte_items import decode_byte_item, reencode_byte_item

try:
    import numpy as np
except ImportError:
    np = None

needs_numpy = pytest.mark.skipif(np is None, reason="numpy is not installed")


def decode(data):
    with hp.watched():
        return decode_byte_item(data, fqn="k", path="p")


BAD_TENSORS = {
    "storage longer than its record": hp.tensor_pickle(3),
    "storage of 2^61 elements": hp.tensor_pickle(2**61),
    "storage of 2^63 elements": hp.tensor_pickle(2**63),
    "storage of -1 elements": hp.tensor_pickle(-1),
    "storage of True elements": hp.tensor_pickle(True),
    "view beyond": hp.tensor_pickle(2, sizes=(3,)),
    "view beyond what the reference claims": hp.tensor_pickle(1),
    "offset beyond": hp.tensor_pickle(2, offset=1),
    "offset negative": hp.tensor_pickle(2, offset=-1),
    "empty view with offset beyond": hp.tensor_pickle(2, offset=3, sizes=(0,)),
    "stride beyond": hp.tensor_pickle(2, strides=(2,)),
    "stride negative": hp.tensor_pickle(2, offset=1, strides=(-1,)),
    "stride overflows": hp.tensor_pickle(2, strides=(2**62 + 1,)),
    "size overflows": hp.tensor_pickle(2, sizes=(2**62, 2**62), strides=(0, 0)),
    "size negative": hp.tensor_pickle(2, sizes=(-2,)),
    "size of floats": hp.tensor_pickle(2, sizes=(2.0,)),
    "size of bools": hp.tensor_pickle(2, sizes=(True,)),
    "size a list": hp.tensor_pickle(2, sizes=[2]),
    "strides missing": hp.tensor_pickle(2, strides=()),
    "no such record": hp.tensor_pickle(2, key="1"),
    "key of another record": hp.tensor_pickle(2, key="../version"),
    "location no device": hp.tensor_pickle(2, location="os.system"),
    "storage itself": hp.storage(2),
    "storage kind": hp.call(hp.TENSOR_V2, hp.storage(2, kind=hp.text("x"))),
    "storage kind patched": hp.state(hp.name("torch", "FloatStorage"), hp.slots(dtype=1)),
    "storage patched": hp.state(hp.storage(2), hp.slots(nbytes=10**9)),
    "tensor patched": hp.state(hp.tensor_pickle(2), hp.slots(data=1)),
    "tensor grown by its setstate": hp.state(
        hp.tensor_pickle(2),
        b"(" + hp.storage(2) + hp.value(0) + hp.value((9,)) + hp.value((1,)) + b"t",
    ),
    "hooks": hp.call(
        hp.TENSOR_V2, hp.storage(2), *[hp.value(x) for x in (0, (2,), (1,), False, {"a": 1})]
    ),
    "metadata": hp.call(
        hp.TENSOR_V2,
        hp.storage(2),
        *[hp.value(x) for x in (0, (2,), (1,), False, {}, {"__class__": True})],
    ),
    "shadowing attribute": hp.call(
        hp.name("torch._tensor", "_rebuild_from_type_v2"),
        hp.TENSOR_V2,
        hp.name("torch", "Tensor"),
        b"(" + hp.storage(2) + b"".join(hp.value(x) for x in (0, (2,), (1,), False, {})) + b"t",
        hp.value({"_reduce_ex_internal": 1}),
    ),
    "other rebuild function": hp.call(
        hp.name("torch._tensor", "_rebuild_from_type_v2"),
        hp.name("collections", "OrderedDict"),
        hp.name("torch", "Tensor"),
        b")",
        hp.value({}),
    ),
    "meta tensor": hp.call(
        hp.name("torch._utils", "_rebuild_meta_tensor_no_storage"),
        hp.name("torch", "float32"),
        *[hp.value(x) for x in ((2**62,), (4,), False)],
    ),
    "invalid date": hp.call(hp.name("datetime", "date"), hp.call(
        hp.name("_codecs", "encode"), hp.text("\x07\xea\x02\x1f"), hp.text("latin1"))),
    "exponent in a Fraction": hp.call(hp.name("fractions", "Fraction"), hp.text("1e999999999")),
    "factory": hp.call(hp.name("collections", "defaultdict"), hp.NAMESPACE),
    "path of a number": hp.call(hp.name("pathlib", "PosixPath"), hp.value(1)),
}  # fmt: skip


def test_parts_that_do_not_fit_are_corruption():
    def check(body):
        with pytest.raises(CorruptionError) as caught:
            decode(hp.torch_zip(hp.document(body), {"data/0": bytes(8)}))
        assert (caught.value.fqn, caught.value.path) == ("k", "p")

    check_rows(BAD_TENSORS, check)


def test_the_fitting_tensor_is_read():
    data = hp.torch_zip(hp.document(hp.tensor_pickle(2)), {"data/0": bytes(8)})
    assert decode(data).tolist() == [0.0, 0.0]


def dtype_pickle(text: str, *state) -> bytes:
    made = hp.call(hp.name("numpy", "dtype"), hp.value(text), hp.value(False), hp.value(True))
    return hp.state(made, hp.value(state)) if state else made


def array_pickle(dtype: bytes, shape, data) -> bytes:
    made = hp.call(
        hp.name("numpy.core.multiarray", "_reconstruct"),
        hp.name("numpy", "ndarray"), hp.value((0,)), hp.value("b"),
    )  # fmt: skip
    state = b"(" + hp.value(1) + hp.value(shape) + dtype + hp.value(False) + data + b"t"
    return hp.state(made, state)


RAW = hp.call(hp.name("_codecs", "encode"), hp.text("a" * 16), hp.text("latin1"))
F8 = dtype_pickle("f8", 3, "<", None, None, None, -1, -1, 0)
FIELDS = {"a": (1, 0)}
BAD_ARRAYS = {
    "shape beyond": array_pickle(F8, (3,), RAW),
    "shape short": array_pickle(F8, (1,), RAW),
    "shape negative": array_pickle(F8, (-1, -2), RAW),
    "shape overflows": array_pickle(F8, (2**62, 2**62), RAW),
    "object dtype": array_pickle(
        dtype_pickle("O8", 3, "|", None, None, None, -1, -1, 63), (2,), hp.value([1, 2])
    ),
    "list of objects": array_pickle(F8, (2,), hp.value([1, 2])),
    "item size of another dtype": array_pickle(
        dtype_pickle("V8", 3, "|", None, None, None, 2**40, 1, 0), (10**6,), RAW
    ),
    "field beyond": dtype_pickle("V8", 3, "|", None, ("a",), {"a": (1, 2**40)}, 8, 1, 16),
    "field of no dtype": dtype_pickle("V8", 3, "|", None, ("a",), FIELDS, 8, 1, 16),
    "byte order": dtype_pickle("f8", 3, "x", None, None, None, -1, -1, 0),
    "commas": dtype_pickle("f8,O"),
    "no state": hp.call(
        hp.name("numpy.core.multiarray", "_reconstruct"),
        hp.name("numpy", "ndarray"), hp.value((0,)), hp.value("b"),
    ),
    "another class": hp.call(
        hp.name("numpy.core.multiarray", "_reconstruct"),
        hp.ORDERED, hp.value((10**12,)), hp.value("b"),
    ),
}  # fmt: skip


def is_corruption(body):
    with pytest.raises(CorruptionError):
        decode(hp.torch_zip(hp.document(body)))


@needs_numpy
def test_arrays_that_do_not_fit_are_corruption():
    check_rows(BAD_ARRAYS, is_corruption)
    assert decode(hp.torch_zip(hp.document(array_pickle(F8, (2,), RAW)))).shape == (2,)


BYTES_IO = hp.new(hp.name("_io", "BytesIO"))


def bytes_io_state(*parts: bytes) -> bytes:
    return hp.state(BYTES_IO, b"(" + b"".join(parts) + b"t")


BAD_BYTES_IO = {
    "never filled": BYTES_IO,
    "made of bytes": hp.state(
        hp.new(hp.name("_io", "BytesIO"), RAW), b"(" + RAW + hp.value(0) + b"Nt"
    ),
    "state of two": bytes_io_state(RAW, hp.value(0)),
    "state a dict": hp.state(BYTES_IO, hp.value({"x": 1})),
    "text": bytes_io_state(hp.text("a"), hp.value(0), b"N"),
    "bytearray": bytes_io_state(hp.call(hp.name("builtins", "bytearray"), RAW), hp.value(0), b"N"),
    "position a bool": bytes_io_state(RAW, hp.value(True), b"N"),
    "position negative": bytes_io_state(RAW, hp.value(-1), b"N"),
    "position beyond the end": bytes_io_state(RAW, hp.value(17), b"N"),
    "attributes": bytes_io_state(RAW, hp.value(0), hp.value({"read": 1})),
}


def test_memory_files_that_do_not_fit_are_corruption():
    check_rows(BAD_BYTES_IO, is_corruption)
    fitting = decode(hp.torch_zip(hp.document(bytes_io_state(RAW, hp.value(16), b"N"))))
    assert (fitting.getvalue(), fitting.tell()) == (b"a" * 16, 16)


def test_hostile_items_are_refused_and_not_passed_on():
    def check(row):
        for read in (decode_byte_item, reencode_byte_item):
            with hp.watched(), pytest.raises(UnsafePickleError) as caught:
                read(hp.torch_zip(hp.document(row[0])), fqn="k", path="p")
            assert caught.value.global_name == row[1]

    check_rows(hp.REFUSED, check)


def test_what_is_no_archive_is_refused_by_kind():
    legacy = saved({"a": 1}, _use_new_zipfile_serialization=False)
    for data in (legacy, b"\x80\x04N.", b"\x28\xb5\x2f\xfd" + bytes(20), b"", b"hello"):
        with pytest.raises(UnsafePickleError, match="trusted=True") as caught:
            decode(data)
        assert caught.value.global_name is None


def test_archives_that_torch_save_does_not_write_are_refused():
    good = hp.document(hp.value(1))
    script = hp.torch_zip(good, {"constants.pkl": good})
    with pytest.raises(UnsafePickleError, match="TorchScript"):
        decode(script)
    for names in (["archive/x"], ["data.pkl"], ["a/data.pkl", "b/data.pkl"], ["a/data.pkl", "b/x"],
                  ["a/b/data.pkl"]):  # fmt: skip
        result = io.BytesIO()
        with zipfile.ZipFile(result, "w") as archive:
            for name in names:
                archive.writestr(name, good)
        with pytest.raises(CorruptionError):
            decode(result.getvalue())
    deflated = io.BytesIO()
    with zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", good + bytes(1000))
    with pytest.raises(CorruptionError):
        decode(deflated.getvalue())
    with pytest.raises(CorruptionError):
        decode(hp.torch_zip(good, {}, b"middle"))
    for end in (30, 200, -1):
        with pytest.raises(CorruptionError):
            decode(saved(torch.ones(3))[:end])


@pytest.mark.slow
def test_decoding_imports_no_module_in_a_fresh_process(tmp_path):
    item = tmp_path / "item"
    item.write_bytes(saved({"a": argparse.Namespace(x=1), "b": torch.ones(2), "c": (1.5, {2})}))
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from torch_dcpx.unpickle.byte_items import decode_byte_item\n"
        "data, before, events = open(sys.argv[1], 'rb').read(), set(sys.modules), []\n"
        "sys.addaudithook(lambda e, a: events.append(e))\n"
        "decode_byte_item(data, fqn='k', path='p')\n"
        "events = {e for e in events if not e.startswith(('gc.', 'object.', 'sys.'))}\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n"
        "assert not events & {'import', 'open', 'exec', 'compile', 'pickle.find_class'}, events\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(item)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@hypothesis.given(st.data())
def test_mutated_items_are_read_or_corrupt(data):
    seeds = [
        {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]},
        [argparse.Namespace(x=datetime.timedelta(1)), torch.nn.Parameter(torch.ones(2))],
    ]
    body = bytearray(saved(data.draw(st.sampled_from(seeds))))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptionError):
        decode(bytes(body))
