"""Hand-made pickles whose lists, dicts, tuples and objects are met again by the memo.

What a pickler writes never takes a list of an object's state from the memo, nor changes one that
was used; a file may. Each is compared with what Python makes of it.
"""

from __future__ import annotations

import pickle

import pytest
from hostile import pickles as hp
from support.metadata_samples import PATH, canonical
from support.rows import check_rows

from torch_dcpx.errors import CorruptionError
from torch_dcpx.metadata.file import decode_metadata
from torch_dcpx.metadata.stock import load_stock_metadata
from torch_dcpx.metadata.stock_columns import open_stock_metadata

MODULE = "torch.distributed.checkpoint.metadata"


def new(name: str, module: str = MODULE) -> bytes:
    return hp.name(module, name) + b")\x81"


def fields(**values: bytes) -> bytes:
    """A dict of the pickles of its values."""
    return b"}(" + b"".join(hp.text(name) + value for name, value in values.items()) + b"u"


def get(index: int) -> bytes:
    return b"h" + bytes([index])


def put(index: int) -> bytes:
    return b"q" + bytes([index])


ONE, TWO = put(1), put(2)
SIZE = hp.call(hp.SIZE, hp.value((4,)))
START = hp.call(hp.SIZE, hp.value((0,)))
EXTENT = fields(offsets=START, sizes=SIZE)
CHUNK = new("ChunkStorageMetadata") + EXTENT + b"b"
LAYOUT = hp.call(hp.name("torch.serialization", "_get_layout"), hp.text("torch.strided"))
BYTES = new("BytesStorageMetadata")
FORMAT = hp.call(hp.name(MODULE, "_MEM_FORMAT_ENCODING"), hp.value(0))
INDEX = new("MetadataIndex") + fields(fqn=hp.text("a")) + b"b"
OTHER_INDEX = new("MetadataIndex") + fields(fqn=hp.text("b")) + b"b"
TEXT_TUPLE = hp.text("torch.strided") + b"\x85"
LAYOUT_OF = hp.name("torch.serialization", "_get_layout")


def properties(layout: bytes = LAYOUT) -> bytes:
    state = hp.name("torch", "float32") + layout + b"\x89" + FORMAT + b"\x89"
    return new("TensorProperties") + b"(" + state + b"tb"


def tensor(chunks: bytes = b"]" + CHUNK + b"a", layout: bytes = LAYOUT) -> bytes:
    state = fields(properties=properties(layout), size=SIZE, chunks=chunks)
    return new("TensorStorageMetadata") + state + b"b"


def place(descriptors: bytes = b"N") -> bytes:
    state = fields(
        relative_path=hp.text("f"),
        offset=hp.value(0),
        length=hp.value(8),
        transform_descriptors=descriptors,
    )
    return new("_StorageInfo", "torch.distributed.checkpoint.filesystem") + state + b"b"


def root(
    entries: bytes = b"}", storage: bytes = b"}", planner: bytes = b"N", meta: bytes = b"N"
) -> bytes:
    """In this order: what is put by one may be asked for by those to the right of it."""
    state = fields(
        storage_meta=meta, planner_data=planner, state_dict_metadata=entries, storage_data=storage
    )
    return hp.document(new("Metadata") + state + b"b")


def modules(value: bytes) -> bytes:
    return new("StorageMeta") + fields(modules=value) + b"b"


SIZE_OF_ONE = hp.SIZE + get(1) + b"\x85R"
REST = hp.text("sizes") + SIZE + b"s"
A_CHUNK = new("ChunkStorageMetadata")

TAKEN = {
    "nothing shared": root(fields(a=tensor(), b=BYTES), b"}" + INDEX + place() + b"s"),
    "a chunk in two lists": root(
        fields(a=tensor(b"]" + CHUNK + ONE + b"a"), b=tensor(b"](" + get(1) + get(1) + b"e"))
    ),
    "a tensor of two names": root(fields(a=tensor() + ONE, b=get(1))),
    "bytes of two names": root(fields(a=BYTES + ONE, b=get(1))),
    "a list that is filled by the memo": root(fields(a=tensor(b"]" + ONE + CHUNK + b"a"))),
    "an empty dict for two": root(planner=b"}" + ONE, entries=get(1)),
    "entries filled in pieces": root(fields(a=BYTES) + ONE + fields(b=BYTES)[1:]),
    "a path of keys that is a call's arguments": root(
        planner=fields(a=TEXT_TUPLE + ONE),
        entries=fields(a=tensor(layout=LAYOUT_OF + get(1) + b"R"), b=tensor()),
    ),
    "a path of keys twice": root(planner=fields(a=TEXT_TUPLE + ONE, b=get(1))),
    "a size of a path's numbers": root(
        planner=fields(a=hp.value((4,)) + ONE),
        entries=fields(a=tensor(b"]" + A_CHUNK + fields(offsets=START, sizes=SIZE_OF_ONE) + b"ba")),
    ),
}
# Valid for Python, each.
DECLINED = {
    "a list of chunks for two": root(fields(a=tensor(b"]" + ONE + CHUNK + b"a"), b=tensor(get(1)))),
    "a list of no chunks for two": root(fields(a=tensor(b"]" + ONE), b=tensor(get(1)))),
    "a list that grows after its use": root(
        fields(a=tensor(b"]" + ONE), b=tensor(get(1) + CHUNK + b"a"))
    ),
    "modules that are descriptors": root(
        meta=modules(b"]" + ONE + hp.text("a") + b"a"),
        storage=b"}" + INDEX + place(get(1)) + b"s",
    ),
    "modules that are chunks": root(meta=modules(b"]" + ONE), entries=fields(a=tensor(get(1)))),
    "a state of two chunks": root(
        fields(a=tensor(b"](" + A_CHUNK + EXTENT + ONE + b"b" + A_CHUNK + get(1) + b"be"))
    ),
    "a state that is another's": root(
        fields(a=tensor(b"](" + A_CHUNK + EXTENT + ONE + b"b" + A_CHUNK + get(1) + REST + b"be"))
    ),
    "a chunk that is met before its state": root(
        fields(a=tensor(b"](" + A_CHUNK + ONE + get(1) + EXTENT + b"be"))
    ),
    "a tensor that is met before its state": root(
        b"}("
        + hp.text("a")
        + new("TensorStorageMetadata")
        + ONE
        + hp.text("b")
        + get(1)
        + fields(properties=properties(), size=SIZE, chunks=b"]")
        + b"bu"
    ),
    "arguments of two calls": root(
        fields(
            a=tensor(layout=LAYOUT_OF + TEXT_TUPLE + ONE + b"R"),
            b=tensor(layout=LAYOUT_OF + get(1) + b"R"),
        )
    ),
    "arguments of a call that are a path of keys": hp.document(
        new("Metadata")
        + fields(
            state_dict_metadata=fields(a=tensor(layout=LAYOUT_OF + TEXT_TUPLE + ONE + b"R")),
            planner_data=fields(b=hp.text("b") + b"\x85", a=get(1)),
            storage_data=b"}",
        )
        + b"b"
    ),
    "a place of the memo that is taken twice": root(
        planner=fields(a=TEXT_TUPLE + ONE, b=hp.value((5,)) + ONE), entries=fields(a=BYTES, b=BYTES)
    ),
    "a place of the memo whose list is gone": root(
        fields(a=tensor(b"]" + ONE), b=tensor(b"]" + ONE + CHUNK + b"a"), c=tensor(get(1)))
    ),
    "a value in two places of the memo": root(planner=fields(a=TEXT_TUPLE + ONE + TWO, b=get(2))),
}


def test_what_the_memo_shares_is_what_python_makes_of_it() -> None:
    def check(data: bytes) -> None:
        found = open_stock_metadata(data)
        assert found is not None
        assert canonical(found) == canonical(load_stock_metadata(data, PATH))
        assert canonical(found) == canonical(pickle.loads(data))

    check_rows(TAKEN, check)


def test_what_is_changed_or_shared_by_its_holders_is_up_to_python() -> None:
    def check(data: bytes) -> None:
        expected = canonical(load_stock_metadata(data, PATH))
        assert open_stock_metadata(data) is None
        assert canonical(decode_metadata(data, PATH).metadata) == expected

    check_rows(DECLINED, check)


# ---- What the memo makes of few bytes ----------------------------------------------------------


def test_path_of_one_text_many_times_is_refused_by_python() -> None:
    """26 KB of a path whose text would have 80 MB."""
    part = hp.text("x" * 10_000) + ONE
    place = hp.call(hp.name("pathlib", "PosixPath"), part, get(1) * 8_000)
    data = root(meta=new("StorageMeta") + fields(checkpoint_id=place) + b"b")
    assert open_stock_metadata(data) is None
    with pytest.raises(CorruptionError, match="far more by its calls than it has bytes"):
        decode_metadata(data, PATH)


def test_long_descriptors_are_up_to_python() -> None:
    """They are compared place by place, and a tuple of them is two bytes of the memo."""
    for count, is_taken in ((16, True), (17, False)):
        names = b"(" + hp.text("a") * count + b"t" + ONE
        storage = b"}(" + INDEX + place(names) + OTHER_INDEX + place(get(1)) + b"u"
        found = open_stock_metadata(root(storage=storage))
        assert (found is not None) is is_taken
        expected = load_stock_metadata(root(storage=storage), PATH)
        assert canonical(decode_metadata(root(storage=storage), PATH).metadata) == canonical(
            expected
        )
