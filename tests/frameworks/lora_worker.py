"""What the tests of fine-tunings run in their environment: `lora_worker.py CASE ARGUMENTS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "frameworks"))


def small(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more))


def make_base(*kinds: str) -> None:
    """Makes `base`, with a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    tokenizer.save_pretrained("base")
    small(attention_bias="bias" in kinds).to(getattr(torch, kinds[0])).save_pretrained("base")


def check_served() -> None:
    """The adapters of the page load, and `merged` is what peft merges."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import torch_dcpx as dcpx

    batch = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(7))
    base = AutoModelForCausalLM.from_pretrained("base")
    plain = base(batch).logits
    served = PeftModel.from_pretrained(base, "adapter")
    adapted = served(batch).logits
    assert not torch.equal(adapted, plain)
    merged = served.merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    assert ours.keys() == merged.keys()
    for name, one in merged.items():
        assert torch.equal(ours[name], one), name
    AutoTokenizer.from_pretrained("merged")
    # By transformers alone, and of a checkpoint.
    again = AutoModelForCausalLM.from_pretrained("step-4")
    assert any("lora_A" in name for name in again.state_dict())
    files = (f"{name}/adapter_model.safetensors" for name in ("step-4", "adapter"))
    found, wanted = (dcpx.load_tensors(file) for file in files)
    assert found.keys() == wanted.keys()


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "up_proj"]},
    "patterns": {
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"q_proj": 5},
    },
    "modules": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    "biases": {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"},
}


def check_merge(dtype: str) -> None:
    """Merges of the base and of a checkpoint of the whole model equal peft's, for each variant."""
    import safetensors.torch as st
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    import torch_dcpx as dcpx

    make_base(dtype, "bias")
    for name, config in VARIANTS.items():
        base = AutoModelForCausalLM.from_pretrained("base")
        model = get_peft_model(base, LoraConfig(r=8, **config))
        with torch.no_grad():
            for one in model.parameters():
                one.add_(torch.randn_like(one) * 0.1 * one.requires_grad)
        model.save_pretrained(f"{name}/adapter")
        dcpx.save({"model": model.state_dict()}, f"{name}/ckpt")
        again = AutoModelForCausalLM.from_pretrained("base")
        merged = PeftModel.from_pretrained(again, f"{name}/adapter").merge_and_unload()
        for source in ("base", f"{name}/ckpt"):
            out = f"{name}/of-{Path(source).name}"
            dcpx.export(source, out, merge_lora=f"{name}/adapter")
            found = st.load_file(f"{out}/model.safetensors")
            assert found.keys() == merged.state_dict().keys(), (name, source)
            for key, one in merged.state_dict().items():
                assert torch.equal(found[key], one), (name, source, key)


def train_accelerate(folder: str, begin: str, end: str, only: str) -> None:
    """Trains steps of an adapter, under FSDP2; resumes from a folder where `begin` is not 0."""
    from accelerate import FullyShardedDataParallelPlugin
    from fsdp_on_cpu import use_fsdp_on_cpu
    from peft import LoraConfig, get_peft_model

    from torch_dcpx.integrations.accelerate import DcpxAccelerator

    use_fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator = DcpxAccelerator(cpu=True, fsdp_plugin=plugin, trainable_only=only == "only")
    model = get_peft_model(small(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    if begin != "0":
        accelerator.load_state(f"{folder}/step_{begin}")
    losses = {}
    for step in range(int(begin) + 1, int(end) + 1):
        batch = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    accelerator.save_state(f"{folder}/step_{end}")
    accelerator.end_training()
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses}))


def train_trainer(folder: str, steps: str, *choices: str) -> None:
    """Trains the head of a model, or an adapter ("peft"), by the Trainer with our callback."""
    from fsdp_on_cpu import use_fsdp_on_cpu
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments, set_seed

    from torch_dcpx.integrations.trainer import DcpxCallback

    more: dict[str, Any] = {}
    if "fsdp" in choices:
        use_fsdp_on_cpu()
        config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
        config["transformer_layer_cls_to_wrap"] = "LlamaDecoderLayer"
        more = {"fsdp": True, "fsdp_config": config}
    settings = TrainingArguments(
        output_dir=folder, max_steps=int(steps), save_steps=2, logging_steps=1, use_cpu=True,
        per_device_train_batch_size=2, report_to="none", disable_tqdm=True,
        lr_scheduler_type="constant", **more,
    )  # fmt: skip
    set_seed(0)
    model = small()
    if "peft" in choices:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    else:
        model.model.requires_grad_(False)
    texts = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1)).tolist()
    data: Any = [{"input_ids": text, "labels": text} for text in texts]
    own = [DcpxCallback(trainable_only="only" in choices)] if "ours" in choices else []
    trainer = Trainer(model=model, args=settings, train_dataset=data, callbacks=own)
    trainer.train(resume_from_checkpoint=True if "resume" in choices else None)
    if trainer.is_world_process_zero():
        rows = trainer.state.log_history
        print(json.dumps({"losses": {r["step"]: r["loss"] for r in rows if "loss" in r}}))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
