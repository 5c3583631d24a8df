"""Says what the machine has: nvidia-smi, the driver as torch and csrc see it, `dcpx doctor`."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys

_SMI = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode,memory.total,pcie.link.gen.max,"
        "pcie.link.width.max,mig.mode.current", "--format=csv,noheader"]  # fmt: skip


def run(*command: str) -> str:
    """Prints what a command prints, and returns it; '' where it is not there or fails."""
    print(f"$ {' '.join(command)}", flush=True)
    if shutil.which(command[0]) is None:
        print(f"{command[0]}: not found")
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout + done.stderr, flush=True)
    return done.stdout if done.returncode == 0 else ""


def main() -> int:
    is_rehearsal = os.environ.get("ON_GPU_REHEARSAL") == "1"
    smi = run(*_SMI).strip()
    run("nvidia-smi", "topo", "-m")
    run("nvcc", "--version")
    run("df", "-h", "/dev/shm", "/tmp")
    import torch

    from torch_dcpx import _C

    driver = _C.device_driver()
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}; csrc: {driver}")
    facts = {
        "gpu": smi.splitlines()[0].split(",")[0] if smi else "no GPU",
        "smi": smi,
        "driver": driver["version"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "has_kernel": driver["has_kernel"],
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["capability"] = torch.cuda.get_device_capability()
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["device_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30)
    facts["short"] = f"{facts['gpu']}, driver {facts['driver']}"
    print("FIGURES", json.dumps(facts), flush=True)
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
