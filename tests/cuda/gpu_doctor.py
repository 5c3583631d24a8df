"""Says what the machine has: nvidia-smi, the driver as torch and csrc see it, `dcpx doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys

LIMIT_S = 8
_SMI = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode,memory.total,pcie.link.gen.max,"
        "pcie.link.width.max,mig.mode.current", "--format=csv,noheader"]  # fmt: skip


def run(*command: str) -> str:
    """Prints what a command prints, and returns it; '' where it is not there, fails or hangs."""
    print(f"$ {' '.join(command)}", flush=True)
    if shutil.which(command[0]) is None:
        print(f"{command[0]}: not found")
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{command[0]}: no end after {LIMIT_S} s", flush=True)
        return ""
    print(done.stdout + done.stderr, flush=True)
    return done.stdout if done.returncode == 0 else ""


def main() -> int:
    is_rehearsal = os.environ.get("ON_GPU_REHEARSAL") == "1"
    smi = run(*_SMI).strip()
    named = [part.strip() for part in smi.partition("\n")[0].split(",")]
    facts = {
        "gpu": named[0] or "no GPU",
        "smi": smi,
        "driver": named[1] if len(named) > 1 else "none",
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    print("FIGURES", json.dumps(facts), flush=True)  # at once: what follows may hang
    import torch

    from torch_dcpx import _C

    driver = _C.device_driver()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; csrc: {driver}")
    facts |= {"driver": driver["version"], "has_kernel": driver["has_kernel"]}
    facts["torch"] = torch.__version__
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["capability"] = torch.cuda.get_device_capability()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["device_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
    facts["short"] = f"{facts['gpu']}, driver {facts['driver']}"
    print("FIGURES", json.dumps(facts), flush=True)
    run("nvidia-smi", "topo", "-m")
    run("nvcc", "--version")
    run("df", "-h", "/dev/shm", "/tmp")
    code = "import sys; from torch_dcpx.cli import main; sys.exit(main())"
    doctor = subprocess.run([sys.executable, "-P", "-c", code, "doctor"], text=True)
    complaints = [
        text
        for is_wrong, text in (
            (doctor.returncode != 0, f"dcpx doctor ended with {doctor.returncode}"),
            (driver["failure"], f"csrc finds no driver: {driver['failure']}"),
            (_too_old(smi), "the driver is older than 12.0's (525)"),
        )
        if is_wrong
    ]
    if not is_rehearsal and not driver["has_kernel"]:
        complaints.append("the package has no pack kernel")
    if not is_rehearsal and not torch.cuda.is_available():
        complaints.append(f"torch, built for CUDA {torch.version.cuda}, finds no device")
    if complaints:
        print(f"REASON {'; '.join(complaints)}")
    return 1 if complaints else 0


def _too_old(smi: str) -> bool:
    found = re.search(r", (\d+)\.", smi)
    return found is not None and int(found[1]) < 525


if __name__ == "__main__":
    sys.exit(main())
