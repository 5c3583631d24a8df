"""What `verify` must say of damage that a test has done."""

from __future__ import annotations

from pathlib import Path

import torch_dcpx as dcpx


def covers(finding: dcpx.Finding, name: str, offset: int) -> bool:
    """Returns whether a finding is about this byte of file `name`."""
    if finding.file != name:
        return False
    if finding.offset is None or finding.nbytes is None:
        return True
    return finding.offset <= offset < finding.offset + max(finding.nbytes, 1)


def assert_found(directory: Path, name: str, offset: int) -> None:
    """Asserts that `verify` names the file and a range with a byte that is not as it was."""
    report = dcpx.verify(directory)
    assert any(covers(finding, name, offset) for finding in report.findings), f"{offset}: {report}"
    assert {finding.file for finding in report.faults} <= {name}, str(report)
