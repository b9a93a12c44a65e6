"""ckpt-chaos's Hugging Face target with SafeTrainer in the place of Trainer, and nothing else changed.

ckpt-chaos starts it as a module, once for each rank and phase.
"""

from __future__ import annotations

from ckpt_chaos.targets import hf_trainer

from safe_trainer import SafeTrainer

if __name__ == "__main__":
    hf_trainer.Trainer = SafeTrainer
    hf_trainer.main()
