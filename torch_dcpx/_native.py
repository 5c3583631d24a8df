"""The one gate to C++: every other module takes the extension from here.

`torch_dcpx/__init__.py` says what is wrong with one that is missing or does not load.
"""

from __future__ import annotations

from torch_dcpx import _C as _C
