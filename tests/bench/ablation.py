"""Measure the example of `%memfit ablation` in the documentation, and draw its picture.

python -m tests.bench.ablation        measure on this machine, write docs/measured.md and docs/ablation.png
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from memlab import Workload, ablation
from memlab.records.ablation import Ablation
from memlab.report import image
from tests.bench.readme import MEASURED, with_section

PICTURE = MEASURED.parent / "ablation.png"
ROWS, TOKENS, STEPS = 8, 64, 5


def main() -> None:
    """Measure and write."""
    found = ablated()
    MEASURED.write_text(with_section(MEASURED.read_text(), "ablation", f"```\n{found}\n```"))
    PICTURE.write_bytes(image.ablation_png(found))
    print(found)


def ablated() -> Ablation:
    """All techniques, on a GPT-2 small enough for one core."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=128,
        n_head=2,
        vocab_size=8192,
        n_positions=TOKENS,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(config.vocab_size, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    return ablation(Workload(model, torch.optim.AdamW(model.parameters()), batch), steps=STEPS)


if __name__ == "__main__":
    main()
