"""`docs/cheatsheet.md`: one page, from what techniques say about themselves."""

from __future__ import annotations

from memlab.plan import FIELDS
from memlab.techniques import TECHNIQUES, Technique
from memlab.techniques.base import Reduces
from tests.docs.markdown import NOTE, code, table

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
    groups = [_group(each) for each in Reduces if kinds_that(each)]
    return "\n\n".join((_HEAD.format(note=NOTE), *groups, _FOOT)) + "\n"


def kinds_that(reduce: Reduces) -> list[type[Technique]]:
    """Return the techniques of a group, in the order of their flags."""
    places = [spec.name for spec in FIELDS]
    kinds = (kind for kind in TECHNIQUES if kind.traits.reduces is reduce)
    return sorted(kinds, key=lambda kind: places.index(kind.field))


def _group(title: Reduces) -> str:
    said = [each for kind in kinds_that(title) for each in kind.descriptions]
    rows = ((code(each.flags), each.saves, each.costs, each.exactness, each.gives_nothing) for each in said)
    return f"## {title}\n\n" + table(("flag", "frees", "costs", "exact?", "saves nothing where"), rows)
