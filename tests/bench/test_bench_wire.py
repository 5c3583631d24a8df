"""The bench of the messages between ranks runs, and ours are the smaller ones."""

from __future__ import annotations

import re

import pytest
import wire


def test_every_message_is_measured_on_both_sides_and_ours_is_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wire.main(["--ranks", "2", "--tensors", "100", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ours ")[0].rstrip() for line in lines] == list(wire.CASES)
    for line in lines:
        ours, stock = (float(nbytes) for nbytes in re.findall(r"([\d.]+) B", line))
        assert ours <= 25 < stock
