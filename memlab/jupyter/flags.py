"""The flags of `%%memfit` and the words of `%memfit` as tables, from which they are read (`parser`) and explained (`help`)."""

from __future__ import annotations

from dataclasses import dataclass

from memlab.plan.fields import ENGINES


@dataclass(frozen=True)
class Flag:
    """A flag that is about the cell, not about the plan.

    Args:
        name: attribute of `CellOptions` it sets.
        flag: the flag.
        metavar: how its value reads in help; empty for a flag without one.
        help: one sentence.
        also: another spelling.
        repeats: whether it may be given several times; values are joined by commas.
    """

    name: str
    flag: str
    metavar: str
    help: str
    also: str = ""
    repeats: bool = False

    @property
    def usage(self) -> str:
        """The flag as help shows it."""
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
        """The subcommand as help shows it."""
        return f"{self.word} {self.arguments}".rstrip()


# fmt: off
_MODEL = Flag("model", "--model", "NAME[,NAME…]", "variables that hold the models, where not all that train are meant",
              repeats=True)
_OPTIMIZER = Flag("optimizer", "--optimizer", "NAME", "variable that holds the optimizer, where there are several")

CELL_FLAGS = (
    _MODEL,
    _OPTIMIZER,
    Flag("budget", "--budget", "SIZE", "choose the fastest plan predicted to fit; flags of techniques are kept in it"),
    Flag("lossless", "--lossless", "", "with --budget: only techniques that keep the gradient unchanged"),
    Flag("capacity", "--capacity", "SIZE", "memory size to give the device in this cell, as in 4GiB"),
    Flag("keep", "--keep", "FIELD[,FIELD…]",
         "settings that must stay as they are when memory runs out: precision, optimizer, checkpointing and so on",
         repeats=True),
    Flag("no_rescue", "--no-rescue", "", "let the cell fail when memory runs out, instead of changing the plan"),
    Flag("background", "--background", "",
         "run the cell on a thread of its own, so that clicks and other cells are handled meanwhile"),
    Flag("inference", "--inference", "",
         "for a cell that only runs forward or generate: gradients off, eval mode; with --fp16 or --bf16 weights in that format"),
    Flag("prove", "--prove", "", "with --inference: find the largest batch that fits --budget, or the device, by running it"),
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
        Flag("order", "--order", "documented|gain",
             "order of the techniques: exact and cheap ones first, or the largest predicted gain first"),
        Flag("steps", "--steps", "N", "steps to time in each row; by default 5"),
        Flag("plans", "--plans", '"FLAGS" …', "add these settings, in this order; the last flag of the line"),
        _LOSSLESS,
        *_WORKLOAD_FLAGS,
    ),
    "panel": (_BUDGET, *_WORKLOAD_FLAGS),
    "snapshot": (
        Flag("predicted", "--predicted", "", "predict the snapshot instead of running two steps for it"),
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
    Word("help", "", "show this"),
)
# fmt: on
