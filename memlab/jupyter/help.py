"""Help of the magics, from the tables of their flags and words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from memlab.jupyter.flags import CELL_FLAGS, PREDICT_FLAGS, WORDS, Flag
from memlab.plan import FIELDS, PlanField

_CELL_EXAMPLES = """\
Examples:
    %%memfit
    train()                                      # changes nothing: measures

    %%memfit --accumulate 4 --checkpoint
    train()

    %%memfit --fp16 --adam8bit --capacity 8GiB
    trainer.train()

    %%memfit --keep precision,optimizer          # when memory runs out: nothing that changes numerics
    train()

    %%memfit --budget 8GiB                       # the fastest plan predicted to fit into 8 GiB
    train()

    %%memfit --background                        # other cells can run meanwhile: %memfit wait, %memfit cancel
    train()

    %%memfit --nproc 2 --scale zero3             # in two processes under DeepSpeed, and everything home again
    train()

    %%memfit --inference --bf16 --budget 8GiB    # a cell that only generates: speed, KV cache, rows that fit
    output = model.generate(**prompts)

    %%memfit --budget 8GiB --bf16 --lossless     # bf16 for certain; the rest is chosen, gradients stay exact
    train()
"""

_LINE_EXAMPLES = """\
Examples:
    %memfit                                      # what is in force, what it needs
    %memfit --accumulate 8                       # another plan, now
    %memfit predict --budget 8GiB                # which plans fit, before any is applied
    %memfit predict --accumulate 4 --device T4   # one plan, on another GPU
    p = %memfit predict --plans "--fp16" "--bf16 --checkpoint"
    found = %memfit find --budget 8GiB           # the fastest plan that fits, run and measured
    a = %memfit ablation --budget 8GiB           # what each technique gives, added one after another until it fits
    %memfit ablation --plans "--bf16" "--checkpoint" "--adam8bit"
    c = %memfit compare "--accumulate 4" "--checkpoint"
    %memfit snapshot step.pickle --predicted --accumulate 4
    %memfit export trainer
    %memfit undo
"""


def cell_help() -> str:
    """Return what `%%memfit?` and `%%memfit -h` show."""
    return "\n".join(
        [
            "%%memfit [flags]",
            "",
            "Run the cell with memory-saving techniques on its live model and optimizer, and measure memory and speed.",
            "The model is found in the notebook, or when the cell first trains it. Without flags of techniques nothing",
            "is changed: the plan in force stays, and the cell is measured. Flags set the whole plan; it stays applied",
            "after the cell, until another one or %memfit undo. With --budget the plan is chosen at the cell's first",
            "training step: every plan is predicted, and the fastest that fits is applied. The receipt then says what",
            "was predicted and what was measured. When memory runs out, the plan is changed and the same batch runs again,",
            "settings given with --keep apart. The same from Python: memlab.fit, memlab.measure.",
            "",
            "Techniques:",
            *_table((_plan_usage(field), field.help) for field in FIELDS),
            "",
            "The cell:",
            *_table((flag.usage, flag.help) for flag in CELL_FLAGS),
            "",
            _CELL_EXAMPLES,
        ]
    )


def line_help() -> str:
    """Return what `%memfit?` and `%memfit help` show."""
    return "\n".join(
        [
            "%memfit [word | flags]",
            "",
            "The plan in force: alone it shows what is applied to which model and what that needs.",
            "",
            *_table((word.usage, word.help) for word in WORDS),
            "",
            "Flags are those of %%memfit (see %%memfit?); %config MemLab holds defaults. predict, find, ablation and",
            "snapshot change nothing, and also know these flags:",
            "",
            *_table((flag.usage, flag.help) for flag in _predict_flags()),
            "",
            _LINE_EXAMPLES,
        ]
    )


def _predict_flags() -> list[Flag]:
    """Every flag of the subcommands that predict, once; which of them knows it, where not all do."""
    known: dict[str, Flag] = {}
    for flags in PREDICT_FLAGS.values():
        for flag in flags:
            of = [other for other, others in PREDICT_FLAGS.items() if any(flag.flag == one.flag for one in others)]
            where = "" if len(of) == len(PREDICT_FLAGS) else f"{', '.join(of)}: "
            known.setdefault(flag.flag, replace(flag, help=where + flag.help))
    return list(known.values())


def _plan_usage(field: PlanField) -> str:
    shorthands = "".join(f", {flag}" for flag in field.shorthands)
    return f"{field.flag} {field.metavar}{shorthands}"


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns; a left side that is too long gets a line of its own."""
    lines = []
    for left, right in rows:
        if len(left) > 34:
            lines += [f"  {left}", f"{'':38}{right}"]
        else:
            lines.append(f"  {left:<36}{right}")
    return lines
