"""Teach a small language model Python's documentation: LoRA under DeepSpeed ZeRO-2, an ordinary training script.

Nothing in it knows about nodes, disks or crashes. Started on each of two nodes as::

    torchrun --nnodes 2 --node-rank $NODE --nproc-per-node 2 --master-addr node0 --master-port 29500 train.py runs/pydoc

it trains; started again after whatever has happened to the job or to a disk, it goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from safe_trainer import SafeTrainer  # the stock script has: from transformers import Trainer

SEQUENCE_LENGTH = 64
MAX_STEPS = 48
SAVE_STEPS = 16

# DeepSpeed's usual file for ZeRO-2; the last two lines are for CPUs, where its own Adam would have to be compiled.
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


class Documentation(Dataset[dict[str, torch.Tensor]]):
    """The text behind Python's ``help()``, cut into pieces of equal length; a token is a byte."""

    def __init__(self) -> None:
        text = "\n".join(topics.values()).encode()
        whole = len(text) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
        self._pieces = torch.tensor(list(text[:whole])).view(-1, SEQUENCE_LENGTH)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def build_model() -> PeftModel:
    """A GPT-2 of two layers with an adapter; its embeddings are trained in full, since there are none to start from."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=SEQUENCE_LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        tie_word_embeddings=False,
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
        modules_to_save=["wte", "lm_head"],
    )
    return get_peft_model(GPT2LMHeadModel(config), lora)


def main(output_dir: str) -> Any:
    """Trains, from the newest checkpoint in `output_dir` if there is one; returns the trainer."""
    set_seed(0)
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=MAX_STEPS,
        save_steps=SAVE_STEPS,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        deepspeed=DEEPSPEED,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SafeTrainer(model=build_model(), args=args, train_dataset=Documentation())
    trainer.train(resume_from_checkpoint="auto")
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", help="run directory: where the checkpoints go, the same path on every node")
    main(parser.parse_args().output_dir)
