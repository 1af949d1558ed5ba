"""`docs/cheatsheet.md`: one page, from what techniques say about themselves."""

from __future__ import annotations

from memlab.techniques import TECHNIQUES
from tests.docs.markdown import NOTE, code, table

# as in the table of a receipt: the category that each reduces
GROUPS = {
    "Activations": ("accumulation", "batchnorm", "checkpointing", "loss", "tiling"),
    "Moments, gradients, weights": ("optimizer", "gradients", "offload", "adapters", "base"),
    "Number formats": ("precision",),
    "Engines": ("scale",),
}
_HEAD = """# Cheat sheet

{note}

Look at the receipt first: **which category is largest at the peak, and in which part of the step is the peak?** A technique that reduces another category
saves nothing. Two techniques that reduce the same category do not add up.

| the peak is mostly | use |
|---|---|
| activations | `--checkpoint`, `--accumulate N`, `--offload activations`, `--bf16` |
| temporaries, in the loss | `--chunk-loss`, `--accumulate N` |
| optimizer state | `--offload optimizer`, `--adam8bit`, `--optim adafactor`, `--lora` |
| gradients | `--release-grads`, `--precision pure-bf16`, `--lora` |
| parameters | `--offload params`, `--offload frozen`, `--lora --base nf4`, `--precision pure-bf16`, `--nproc P --scale fsdp2` |
| other tensors | on a GPU: what is no part of the loop; `del` models and data of the notebook that are not needed, or move them with `.cpu()` |
| unused but reserved | on a GPU: fragmentation; fewer sizes, or `PYTORCH_ALLOC_CONF=expandable_segments:True` before the kernel starts |"""
_FOOT = """## Ask instead of guessing

| | |
|---|---|
| `%memfit predict --budget 8GiB` | what every plan would need and how fast it would be, before any is applied |
| `%memfit ablation --budget 8GiB` | techniques added one after another, each measured, everything put back |
| `%memfit find --budget 8GiB` | the fastest plan that fits, verified by running it |
| `%%memfit --budget 8GiB` | the same without verification, for this cell |
| `%memfit undo` | restore model and optimizer exactly |

Details of each flag: [flags](flags.md). Nothing became smaller? [Why did nothing change?](why_did_nothing_change.md)"""


def page() -> str:
    """The page."""
    return "\n\n".join((_HEAD.format(note=NOTE), *map(_group, GROUPS), _FOOT)) + "\n"


def _group(title: str) -> str:
    fields = GROUPS[title]
    said = [each for field in fields for kind in TECHNIQUES if kind.field == field for each in kind.descriptions]
    rows = ((code(each.flags), each.saves, each.costs, each.exactness, each.gives_nothing) for each in said)
    return f"## {title}\n\n" + table(("flag", "frees", "costs", "exact?", "saves nothing where"), rows)
