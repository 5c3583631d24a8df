"""A fine-tuning with peft from its first step to a served model, as docs/howto/lora.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.frameworks import ROOT, Framework, Run

PAGE = (ROOT / "docs" / "howto" / "lora.md").read_text()
WORKER = str(ROOT / "tests" / "frameworks" / "lora_worker.py")


def block(number: int) -> str:
    return re.findall(r"^```\w+\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[number]


@pytest.fixture
def framework(tmp_path: Path) -> Framework:
    return Framework("lora", tmp_path)


def case(framework: Framework, *arguments: object, ranks: int = 1) -> Run:
    python = [str(framework.bin / "python")]
    if ranks > 1:
        python = [str(framework.bin / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    return framework.run([*python, WORKER, *map(str, arguments)], hook=False)


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_page_leads_from_a_training_to_a_served_model(framework: Framework) -> None:
    folder = framework.folder
    case(framework, "make_base", "float32")
    (folder / "lora.py").write_text(block(0))
    framework.run(["bash", "-euc", block(1)], hook=False)
    assert (folder / "run" / "newest").read_text().strip() != ""
    weights = (folder / "base" / "model.safetensors").stat().st_size
    assert nbytes(folder / "run" / "step-4") < weights / 2
    framework.run([str(framework.bin / "python"), "-c", block(2)], hook=False)
    framework.run(["bash", "-euc", block(3)], hook=False)
    case(framework, "check_served")


@pytest.mark.parametrize("way", ["single", "ddp", "fsdp2"])
def test_resumed_training_equals_one_that_was_not_ended(framework: Framework, way: str) -> None:
    folder = framework.folder
    case(framework, "make_base", "float32")
    adapters = []
    for name, runs in (("ended", (2, 4)), ("straight", (4,))):
        (folder / name).mkdir()
        (folder / name / "base").symlink_to(folder / "base")
        (folder / name / "lora.py").write_text(block(0))
        start = "python" if way == "single" else "torchrun --standalone --nproc-per-node 2"
        for steps in runs:
            line = f"cd {name}; {start} lora.py {way} {steps}"
            framework.run(["bash", "-euc", line], hook=False)
        adapters.append((folder / name / "adapter" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_equals_that_of_peft_to_the_bit(framework: Framework, dtype: str) -> None:
    case(framework, "check_merge", dtype)


def test_accelerate_saves_and_resumes_the_adapter_alone(framework: Framework) -> None:
    straight = case(framework, "train_accelerate", "whole", 0, 4, "all", ranks=2)
    first = case(framework, "train_accelerate", "own", 0, 2, "only", ranks=2)
    second = case(framework, "train_accelerate", "own", 2, 4, "only", ranks=2)
    losses = first.result["losses"] | second.result["losses"]
    assert losses == straight.result["losses"]
    assert not any("does not hold" in line for line in second.log)
    model = "pytorch_model_fsdp_0"
    own, whole = (framework.folder / name / "step_4" / model for name in ("own", "whole"))
    assert nbytes(own) < nbytes(whole) / 5
    # A folder of the whole model resumes as well.
    case(framework, "train_accelerate", "whole", 4, 5, "only", ranks=2)


@pytest.mark.parametrize("kind", ["head", "peft"])
def test_trainer_saves_and_resumes_what_is_trained(framework: Framework, kind: str) -> None:
    own = ("fsdp", "ours", "only", kind)
    case(framework, "train_trainer", "own", 4, *own, ranks=2)
    second = case(framework, "train_trainer", "own", 6, *own, "resume", ranks=2)
    straight = case(framework, "train_trainer", "whole", 6, "fsdp", kind, ranks=2)
    assert second.result["losses"] == straight.result["losses"]
    assert nbytes(framework.folder / "own" / "checkpoint-2" / "pytorch_model_fsdp_0") < 60_000


@pytest.mark.parametrize("ranks", [1, 2], ids=["one process", "DDP"])
def test_callback_without_fsdp_says_that_it_is_left_out(framework: Framework, ranks: int) -> None:
    with pytest.raises(AssertionError, match="has no FSDP: leave the callback out"):
        case(framework, "train_trainer", "own", 4, "ours", "peft", ranks=ranks)
    case(framework, "train_trainer", "own", 4, "peft", ranks=ranks)
    assert (framework.folder / "own" / "checkpoint-4" / "adapter_model.safetensors").exists()
