"""TRL's SFTTrainer, made safe in both ways: it writes a model card around its save (case N1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from safe_trainer import SafeCheckpointMixin, make_safe
from tests import checks, training
from tests.cluster import Cluster
from tests.distributed.runs import run_directories

TIMEOUT_S = 240.0


def fine_tune(*, output_dir: str, how: str, resume: bool) -> dict[str, Any]:
    """Train for four steps on tokens that are ready, with LoRA, and save every second step."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class Mixed(SafeCheckpointMixin, SFTTrainer):
        pass

    tokens = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>", pad_token="<eos>")
    ids = torch.randint(2, training.VOCABULARY, (32, training.SEQUENCE_LENGTH)).tolist()
    with training.clean_process():
        trainer = (Mixed if how == "mixin" else make_safe(SFTTrainer))(
            model=training._model("ddp", 0),
            args=SFTConfig(
                output_dir=output_dir,
                max_steps=4 if resume else 2,
                save_steps=2,
                per_device_train_batch_size=2,
                use_cpu=True,
                ddp_backend="gloo",
                bf16=False,
                report_to="none",
                max_length=training.SEQUENCE_LENGTH,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
        )
        trainer.train(resume_from_checkpoint=resume)
        return {"step": trainer.state.global_step, "safe": isinstance(trainer, SafeCheckpointMixin)}


@pytest.mark.parametrize("how", ["mixin", "make_safe"])
def test_sft_trainer_saves_whole_checkpoints_and_resumes(two_nodes: Cluster, how: str) -> None:
    disks = two_nodes.disks("split", f"sft-{how}")
    output_dir = f"{disks.path}/run"

    two_nodes.run(fine_tune, output_dir=output_dir, how=how, resume=False, timeout_s=TIMEOUT_S)
    results = two_nodes.run(fine_tune, output_dir=output_dir, how=how, resume=True, timeout_s=TIMEOUT_S)

    home: Path = run_directories(disks)[0]
    assert results == [{"step": 4, "safe": True}] * 4
    assert checks.checkpoints(home) == [2, 4]
    for step in (2, 4):
        checks.assert_matches_manifest(home / f"checkpoint-{step}")
        assert "adapter_model.safetensors" in checks.files_below(home / f"checkpoint-{step}")
    assert (home / "README.md").exists()  # TRL's model card, beside the checkpoints as always
