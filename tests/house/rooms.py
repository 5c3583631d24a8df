"""The rooms of csrc and torch_dcpx, and what each may use: of test_house.py."""

from __future__ import annotations

# Room -> rooms that its files may include beside their own.
ROOMS: dict[str, set[str]] = {
    "common": set(),
    "format": {"common"},
    "plan": {"common"},
    "io": {"common"},
    "device": {"common", "plan"},
    "engine": {"common", "format", "plan", "io", "device"},
    "dcp": {"common", "format", "plan", "io", "device", "engine"},
    "bind": {"common", "format", "plan", "io", "device", "engine", "dcp"},
}

# Rooms that know Python.
PYTHON_ROOMS = {"dcp", "bind"}

# The ground of torch_dcpx: the modules of the folder itself, which import no room.
GROUND = {
    "__init__", "_answered_os", "_answers", "_arguments", "_compat", "_descriptors",
    "_environment", "_gc", "_globs", "_hooks", "_integers", "_json", "_keywords", "_last_jobs",
    "_mounts", "_native", "_plan_classes", "_replacing", "_text", "_trace_files",
    "_version", "_waiting", "errors", "events", "options", "reports", "timelines",
}  # fmt: skip

# Room of torch_dcpx -> rooms that its modules may import, beside their own and the ground.
PACKAGE_ROOMS: dict[str, set[str]] = {
    "storage": set(),
    "tensors": set(),
    "ranks": {"tensors"},
    "unpickle": set(),
    "metadata": {"storage", "unpickle"},
    "staging": {"tensors"},
    "reader": {"storage", "tensors", "unpickle", "metadata"},
    "keys": {"storage", "tensors", "metadata", "reader"},
    "writer": {"storage", "tensors", "ranks", "unpickle", "metadata", "staging"},
    "planners": {"tensors", "ranks", "metadata", "reader", "keys", "writer"},
    "checkpoint": {
        "storage", "tensors", "ranks", "unpickle", "metadata", "staging", "reader", "keys",
        "writer", "planners",
    },
    "integrity": {"storage", "tensors", "unpickle", "metadata", "reader", "writer"},
    "artifacts": {"storage", "tensors", "ranks", "metadata", "reader", "keys", "planners",
                  "checkpoint"},
    "manager": {
        "storage", "tensors", "ranks", "unpickle", "metadata", "staging", "reader", "keys",
        "writer", "planners", "checkpoint", "integrity", "artifacts",
    },
    "hook": {"tensors", "staging", "reader", "writer", "planners"},
    "integrations": {
        "storage", "tensors", "ranks", "unpickle", "metadata", "staging", "reader", "keys",
        "writer", "planners", "checkpoint", "integrity", "artifacts", "manager",
    },
    "views": {
        "storage", "tensors", "metadata", "reader", "keys", "checkpoint", "integrity", "artifacts",
    },
    "cli": {
        "storage", "unpickle", "metadata", "reader", "keys", "checkpoint", "integrity", "artifacts",
        "hook", "views", "writer",
    },
}  # fmt: skip

# Folders of tests beside those of the rooms: the ground and csrc through the door, stock DCP and
# other torches, what goes wrong, what each place of checkpoints promises.
OTHER_TESTS = {
    "base",
    "bench",
    "contracts",
    "cpp",
    "cuda",
    "dfs",
    "fake_cuda",
    "faults",
    "frameworks",
    "house",
    "objects",
    "interop",
    "native",
    "pages",
    "pages_code",
}

# Modules that work, and start at once, without torch.
MODULES_WITHOUT_TORCH = {
    "__init__",
    "_version",
    "_arguments",
    "_environment",
    "_integers",
    "_keywords",
    "_text",
    "errors",
    "hook.autoload",
    "hook.settings",
    "staging.host_memory",
    "options",
}
