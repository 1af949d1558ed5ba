"""The flags of `%%memfit` and the words of `%memfit` as tables, from which `parser` reads them, and what help says about them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

from memlab.plan import FIELDS, PlanField
from memlab.plan.settings.scale import ENGINES


@dataclass(frozen=True)
class Flag:
    """A flag that is about the cell, not about the plan."""

    name: str  # attribute of `CellOptions` it sets
    flag: str
    metavar: str  # how its value reads in help; empty for a flag without one
    help: str  # one sentence
    also: str = ""  # another spelling
    repeats: bool = False  # whether it may be given several times; values are joined by commas
    untrained: str = ""  # why it means nothing where nothing is trained; empty where it does
    in_ranks: str = ""  # why it means nothing where other processes train; empty where it does

    @property
    def usage(self) -> str:
        spelled = f"{self.also}, {self.flag}" if self.also else self.flag
        return f"{spelled} {self.metavar}".rstrip()


@dataclass(frozen=True)
class Word:
    """A subcommand of `%memfit`."""

    word: str
    arguments: str
    help: str

    @property
    def usage(self) -> str:
        return f"{self.word} {self.arguments}".rstrip()


# fmt: off
_MODEL = Flag("model", "--model", "NAME[,NAME…]", "variables that hold the models, where not all that train are meant",
              repeats=True)
_OPTIMIZER = Flag("optimizer", "--optimizer", "NAME", "variable that holds the optimizer, where there are several",
                  untrained="no optimizer runs")
_NOT_CHOSEN, _NOT_RESCUED = "plans are chosen for one process", "a cell in several processes is not rescued"

CELL_FLAGS = (
    _MODEL,
    _OPTIMIZER,
    Flag("budget", "--budget", "SIZE", "choose the fastest plan predicted to fit; flags of techniques are kept in it",
         in_ranks=_NOT_CHOSEN),
    Flag("lossless", "--lossless", "", "with --budget: only techniques that keep the gradient unchanged",
         untrained="--budget chooses no plan there, it is what the batch is to fit into", in_ranks=_NOT_CHOSEN),
    Flag("capacity", "--capacity", "SIZE", "memory size to give the device in this cell, as in 4GiB"),
    Flag("keep", "--keep", "FIELD[,FIELD…]",
         "settings that must stay as they are when memory runs out: precision, optimizer, checkpointing and so on",
         repeats=True, untrained="an inference cell is not rescued", in_ranks=_NOT_RESCUED),
    Flag("no_rescue", "--no-rescue", "", "let the cell fail when memory runs out, instead of changing the plan",
         untrained="an inference cell is not rescued", in_ranks=_NOT_RESCUED),
    Flag("background", "--background", "",
         "run the cell on a thread of its own, so that clicks and other cells are handled meanwhile",
         untrained="an inference cell runs in the foreground", in_ranks="a cell in several processes is waited for"),
    Flag("inference", "--inference", "",
         "for a cell that only runs forward or generate: gradients off, eval mode; with --fp16 or --bf16 weights in that format",
         in_ranks="only training runs in several processes"),
    Flag("nproc", "--nproc", "N",
         f"train in N processes, and bring the results back; with --scale {'|'.join(ENGINES)}"),
    Flag("quiet", "--quiet", "", "show no progress while the cell runs"),
    Flag("help", "--help", "", "show this and run nothing", also="-h"),
)

_BUDGET = Flag("budget", "--budget", "SIZE", "memory that plans must fit into, as in 8GiB")
_WORKLOAD_FLAGS = (
    Flag("batch", "--batch", "NAME[,NAME…]",
         "variables that make a batch; by default the largest batch of the last %%memfit cell"),
    Flag("loss_fn", "--loss-fn", "NAME", "variable called with output and target; the batch is then inputs,target"),
    _MODEL,
    _OPTIMIZER,
)
_LOSSLESS = Flag("lossless", "--lossless", "", "only techniques that keep the gradient unchanged")
_GPU = Flag("device", "--device", "GPU",
            "a GPU of the catalogue to predict for, as in T4; by default the model's device")
# flags of the subcommands that predict; those of a plan come on top
PREDICT_FLAGS: dict[str, tuple[Flag, ...]] = {
    "predict": (
        _BUDGET,
        _GPU,
        Flag("all", "--all", "", "show every plan, not the best ones only"),
        Flag("nproc", "--nproc", "N",
             f"predict what a rank needs with 1, 2, 4 … N processes, with --scale {'|'.join(ENGINES)}"),
        Flag("plans", "--plans", '"FLAGS" …', "predict these plans; the last flag of the line"),
        _LOSSLESS,
        *_WORKLOAD_FLAGS,
    ),
    "find": (_BUDGET, _LOSSLESS, *_WORKLOAD_FLAGS),
    "ablation": (
        _BUDGET,
        Flag("steps", "--steps", "N", "steps to time in each row; by default 5"),
        Flag("plans", "--plans", '"FLAGS" …', "add these settings, in this order; the last flag of the line"),
        _LOSSLESS,
        *_WORKLOAD_FLAGS,
    ),
    "panel": (_BUDGET, *_WORKLOAD_FLAGS),
    "worst": tuple(each for each in _WORKLOAD_FLAGS if each.name != "batch"),
    "snapshot": (
        Flag("predicted", "--predicted", "", "predict the snapshot instead of running two steps for it, as is done for a model on the CPU anyway"),
        _GPU,
        *_WORKLOAD_FLAGS,
    ),
}
# the flag that takes the rest of the line, and the subcommands that know it
LAST_FLAG = dict.fromkeys(("predict", "ablation"), "--plans")

WORDS = (
    Word("panel", "[--budget SIZE] [--batch NAME]", "switch settings with the mouse, and watch memory and throughput"),
    Word("predict", "[FLAGS] [--budget SIZE] [--device GPU] [--all]",
         "predict memory and speed of all plans, or of one; with --scale and --nproc of each rank"),
    Word("find", "--budget SIZE [FLAGS]",
         "search for the fastest plan that fits, and verify it by running it; returns the FoundPlan"),
    Word("ablation", "[--budget SIZE] [FLAGS]",
         "add one technique after another and measure what each saves, then put everything back; returns the Ablation"),
    Word("report", "", "the settings measured so far, as a table and as a picture; returns the Comparison"),
    Word("compare", '"FLAGS" …',
         "measure plans from the same starting point, then put everything back; returns the Comparison"),
    Word("worst", "[LOADER] [FLAGS]",
         "predict and rehearse a step on the largest batch that a DataLoader can give, then put everything back; returns the Comparison"),
    Word("switch", "FLAGS", "change the plan now; %memfit FLAGS does the same"),
    Word("wait", "", "wait for the %%memfit --background cell; fails when it has failed"),
    Word("cancel", "", "end the %%memfit --background cell before its next step"),
    Word("undo", "[all]", "remove the plan from the model of the last cell, or from all models"),
    Word("export", "[torch|trainer|accelerate|deepspeed|fsdp2] [FLAGS] [--scale ENGINE [--nproc N]]",
         "the plan in force, or the one given, as code"),
    Word("device", "[--capacity SIZE|none]", "the device whose memory is counted, and its capacity"),
    Word("snapshot", "FILE [--predicted] [FLAGS]", "save a memory snapshot of a step for pytorch.org/memory_viz"),
    Word("record", "FILE", "save what was measured as JSON"),
    Word("replay", "FILE", "show a saved file, measured here or elsewhere; returns the Comparison"),
    Word("bug", "[FILE]", "show what a maintainer needs to know (no values, paths or code), or write it to a file, to be pasted into an issue"),
    Word("help", "", "show this"),
)
# fmt: on


_CELL_EXAMPLES = """\
Examples:
    %%memfit
    train()  # changes nothing: measures

    %%memfit --accumulate 4 --checkpoint
    train()

    %%memfit --fp16 --adam8bit --capacity 8GiB
    trainer.train()

    %%memfit --keep precision,optimizer
    train()  # when memory runs out, nothing that changes numerics

    %%memfit --budget 8GiB
    train()  # under the fastest plan predicted to fit into 8 GiB

    %%memfit --budget 8GiB --bf16 --lossless
    train()  # bf16 for certain; the rest is chosen, gradients exact

    %%memfit --background
    train()  # other cells can run: %memfit wait, %memfit cancel

    %%memfit --nproc 2 --scale zero3
    train()  # in two processes under DeepSpeed; everything comes back

    %%memfit --inference --bf16 --budget 8GiB
    output = model.generate(**prompts)  # speed, cache, rows that fit
"""

_LINE_EXAMPLES = (
    ("%memfit", "what is in force, what it needs"),
    ("%memfit --accumulate 8", "another plan, now"),
    ("%memfit predict --budget 8GiB", "which plans fit, before any is applied"),
    ("%memfit predict --accumulate 4 --device T4", "one plan, on another GPU"),
    ('p = %memfit predict --plans "--fp16" "--bf16 --checkpoint"', "these two"),
    ("found = %memfit find --budget 8GiB", "the fastest plan that fits, run and measured"),
    ("a = %memfit ablation --budget 8GiB", "what each technique gives, added one after another until it fits"),
    ('%memfit ablation --plans "--bf16" "--checkpoint" "--adam8bit"', "these, in this order"),
    ('c = %memfit compare "--accumulate 4" "--checkpoint"', "each from the same starting point"),
    ("%memfit snapshot step.pickle --predicted --accumulate 4", "for pytorch.org/memory_viz"),
    ("%memfit export trainer", "the plan as code without memlab"),
    ("%memfit undo", "no plan; what was trained stays"),
)

_ABOUT_CELLS = (
    "Run the cell with memory-saving techniques on its live model and optimizer, and measure memory and speed. "
    "The model is found in the notebook, or when the cell first trains it. Without flags of techniques nothing "
    "is changed: the plan in force stays, and the cell is measured. Flags set the whole plan; it stays applied "
    "after the cell, until another one or %memfit undo. With --budget the plan is chosen at the cell's first "
    "training step: every plan is predicted, and the fastest that fits is applied. The receipt then says what "
    "was predicted and what was measured. When memory runs out, the plan is changed and the same batch runs again, "
    "settings given with --keep apart. The same from Python: memlab.fit, memlab.measure."
)

# a cell of a narrow page has as many, and a terminal
_MOST_CHARACTERS, _LEFT_CHARACTERS = 71, 26


def cell_help() -> str:
    """Return what `%%memfit?` and `%%memfit -h` show."""
    return "\n".join(
        [
            "%%memfit [flags]",
            "",
            textwrap.fill(_ABOUT_CELLS, _MOST_CHARACTERS),
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
            "The plan in force: alone it shows what is applied to which model and",
            "what that needs.",
            "",
            *_table((word.usage, word.help) for word in WORDS),
            "",
            "Flags are those of %%memfit (see %%memfit?); %config MemLab holds",
            "defaults. predict, find, ablation and snapshot change nothing, and also",
            "know these flags:",
            "",
            *_table((flag.usage, flag.help) for flag in _predict_flags()),
            "",
            "Examples:",
            *_table(_LINE_EXAMPLES),
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
    """Two columns; a left side that is too long gets lines of its own."""
    lines = []
    for left, right in rows:
        of_left = textwrap.wrap(left, _MOST_CHARACTERS - 4, break_on_hyphens=False)
        of_right = textwrap.wrap(right, _MOST_CHARACTERS - _LEFT_CHARACTERS, break_on_hyphens=False)
        if len(left) <= _LEFT_CHARACTERS - 4:
            first = of_left.pop()
            lines.append(f"  {first:<{_LEFT_CHARACTERS - 2}}{of_right.pop(0)}")
        lines += [f"{'':{2 * bool(at) + 2}}{line}" for at, line in enumerate(of_left)]
        lines += [f"{'':{_LEFT_CHARACTERS}}{line}" for line in of_right]
    return lines
