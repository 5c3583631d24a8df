"""Options that are not given come from variables, which are checked as arguments are."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from torch_dcpx import DcpxReader, DcpxWriter, OptionError, ReadOptions, WriteOptions
from torch_dcpx._environment import variable_of

MIB = 1 << 20

BOTH = [
    ("DCPX_ENDPOINT", "http://minio:9000", "http://minio:9000"),
    ("DCPX_HOST_MEMORY_BYTES", "16777216", 16 * MIB),
    ("DCPX_WORKERS", "3", 3),
    ("DCPX_SLOT_BYTES", "262144", 256 << 10),
    ("DCPX_DIRECT_IO", "0", False),
    ("DCPX_DIRECT_IO", "True", True),
]
OF_A_SAVE = [
    ("DCPX_CHECK_VISIBLE", "auto", "auto"),
    ("DCPX_CHECK_VISIBLE", "0", False),
    ("DCPX_VISIBLE_S", "2.5", 2.5),
    ("DCPX_DURABILITY", "none", "none"),
    ("DCPX_FILES_PER_RANK", "4", 4),
    ("DCPX_PROGRESS", "1", True),
    ("DCPX_SAVE_TIMEOUT_S", "90", 90.0),
    ("DCPX_MAX_IN_FLIGHT", "2", 2),
    ("DCPX_ON_BUSY", "skip", "skip"),
    ("DCPX_OVERLAP", "1", True),
    ("DCPX_NODE_LOCAL", "true", True),
    ("DCPX_IN_PLACE", "never", "never"),
    ("DCPX_CONDITIONAL_COMMIT", "0", False),
]
OF_A_LOAD = [
    ("DCPX_VISIBLE_S", "2", 2.0),
    ("DCPX_VERIFY", "none", "none"),
    ("DCPX_TRUSTED", "0", False),
    ("DCPX_LOAD_TIMEOUT_S", "0.5", 0.5),
    ("DCPX_NODE_LOCAL", "1", True),
]
CASES = [(WriteOptions, *case) for case in BOTH + OF_A_SAVE] + [
    (ReadOptions, *case) for case in BOTH + OF_A_LOAD
]


def test_what_is_not_given_is_taken_from_the_variable_that_every_option_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cls, variable, text, value in CASES:
        name = variable.removeprefix("DCPX_").lower()
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            found = getattr(cls(), name)
            assert (found, type(found)) == (value, type(value)), (cls, variable)
            assert getattr(cls(**{name: getattr(cls, name)}), name) == getattr(cls, name)
    tried = {(cls, variable) for cls, variable, _, _ in CASES}
    for cls in (WriteOptions, ReadOptions):
        for field in dataclasses.fields(cls):
            assert (cls, variable_of(field.name)) in tried or field.name == "safe_globals"


WRONG = [
    (WriteOptions, "DCPX_HOST_MEMORY_BYTES", "64MiB"),
    (WriteOptions, "DCPX_HOST_MEMORY_BYTES", "1_000_000"),
    (WriteOptions, "DCPX_HOST_MEMORY_BYTES", "-1"),
    (WriteOptions, "DCPX_HOST_MEMORY_BYTES", "1e9"),
    (WriteOptions, "DCPX_HOST_MEMORY_BYTES", "9" * 5000),
    (WriteOptions, "DCPX_WORKERS", "0"),
    (WriteOptions, "DCPX_WORKERS", " 2"),
    (WriteOptions, "DCPX_WORKERS", "\u0662"),  # a digit, but of another script
    (WriteOptions, "DCPX_WORKERS", "200"),  # more slots than the budget holds
    (WriteOptions, "DCPX_DIRECT_IO", "yes"),
    (WriteOptions, "DCPX_DURABILITY", "Full"),
    (WriteOptions, "DCPX_SAVE_TIMEOUT_S", "0"),
    (WriteOptions, "DCPX_SAVE_TIMEOUT_S", "inf"),
    (WriteOptions, "DCPX_SAVE_TIMEOUT_S", "30min"),
    (WriteOptions, "DCPX_ON_BUSY", "drop"),
    (WriteOptions, "DCPX_OVERLAP", "late"),
    (WriteOptions, "DCPX_NODE_LOCAL", "yes"),
    (ReadOptions, "DCPX_NODE_LOCAL", "yes"),
    (WriteOptions, "DCPX_CONDITIONAL_COMMIT", "no"),
    (ReadOptions, "DCPX_ENDPOINT", "minio:9000"),
    (WriteOptions, "DCPX_PROGRESS", "print"),
    (ReadOptions, "DCPX_VERIFY", "all"),
    (ReadOptions, "DCPX_TRUSTED", "1"),
    (ReadOptions, "DCPX_TRUSTED", "TRUE"),
    (ReadOptions, "DCPX_TRUSTED", "perhaps"),
    (ReadOptions, "DCPX_SAFE_GLOBALS", "os.path,system"),
    (ReadOptions, "DCPX_SLOT_BYTES", "100000"),
]


def test_a_variable_that_cannot_work_is_named_with_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cls, variable, text in WRONG:
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            with pytest.raises(OptionError, match=variable) as caught:
                cls()
        assert (caught.value.option, caught.value.value) == (variable, text)


def test_a_password_in_an_endpoint_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "http://user:secret@minio:9000"
    monkeypatch.setenv("DCPX_ENDPOINT", secret)
    for cls in (WriteOptions, ReadOptions):
        for given, option in (({}, "DCPX_ENDPOINT"), ({"endpoint": secret}, "endpoint")):
            with pytest.raises(OptionError, match="a password") as caught:
                cls(**given)
            assert (caught.value.option, caught.value.value) == (option, None)
            assert "secret" not in str(caught.value)


def test_a_variable_cannot_trust_a_checkpoint_but_code_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DCPX_TRUSTED", "1")
    with pytest.raises(OptionError, match="DCPX_TRUSTED"):
        DcpxReader(tmp_path)
    assert DcpxReader(tmp_path, options=ReadOptions(trusted=False)).options.trusted is False
    assert ReadOptions(trusted=True).trusted is True


def test_an_argument_contradicted_by_a_variable_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPX_HOST_MEMORY_BYTES", str(MIB))
    with pytest.raises(OptionError, match=f"DCPX_HOST_MEMORY_BYTES='{MIB}'") as caught:
        WriteOptions(workers=2, slot_bytes=MIB)
    assert (caught.value.option, caught.value.value) == ("workers", 2)


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in (*dataclasses.fields(WriteOptions), *dataclasses.fields(ReadOptions)):
        monkeypatch.setenv(variable_of(field.name), "")
    assert WriteOptions().durability == "full"
    assert ReadOptions().verify == "blocks"


def test_positional_arguments_are_given_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCPX_DURABILITY", "none")
    assert WriteOptions("full").durability == "full"


def test_copies_keep_their_values_and_ask_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = WriteOptions()
    monkeypatch.setenv("DCPX_DURABILITY", "none")
    monkeypatch.setenv("DCPX_SAVE_TIMEOUT_S", "nonsense")
    assert dataclasses.replace(plain, workers=2).durability == "full"
    assert pickle.loads(pickle.dumps(plain)) == plain


def test_a_writer_without_options_takes_variables_below_stocks_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DCPX_DURABILITY", "none")
    monkeypatch.setenv("DCPX_WORKERS", "2")
    assert DcpxWriter(tmp_path).sync_files is False
    assert DcpxWriter(tmp_path).thread_count == 2
    writer = DcpxWriter(tmp_path, sync_files=True, thread_count=3)
    assert (writer.sync_files, writer.thread_count) == (True, 3)
    monkeypatch.setenv("DCPX_HOST_MEMORY_BYTES", str(8 * MIB))
    assert DcpxWriter(tmp_path, thread_count=1).options.host_memory_bytes == 8 * MIB
    with pytest.raises(OptionError, match="host_memory_bytes"):
        DcpxWriter(tmp_path, thread_count=100)
