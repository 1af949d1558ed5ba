"""`%memfit bug`: what a maintainer needs to understand a problem, as a text that the user reads before anybody else does.

Rules:

1. In it are versions, processors, plans, what memlab logged and measured, classes of modules with shapes and dtypes, and where in
   memlab and torch the last error came from.
2. Not in it are values, paths, names of files, the user's code and lines of it, and text of errors that are not memlab's.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path, PurePath

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import memlab
from memlab.errors import MemlabError
from memlab.jupyter.history import History
from memlab.session import Session
from memlab.support.machine import described
from memlab.units import format_bytes

_LIST = ", "
_MOST_KINDS = 30  # of modules that are listed
_MOST_ENTRIES = 40  # of the log, the newest
_ROOT = str(Path(memlab.__file__).parent)
_OWN = (
    "memlab",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "lightning",
    "bitsandbytes",
    "deepspeed",
    "IPython",
)
# what could be a path, a name of a file, a line of code, and a word in quotes
_PRIVATE = (
    (re.compile(r"(?:[A-Za-z]:|[\w.~@+-]+)?(?:[\\/][\w.~@+ -]+){2,}"), "<path>"),
    (
        re.compile(
            r"(?:[\w.~@+-]+[\\/])?\b[\w-]+\.(?:py|ipynb|pt|pth|bin|safetensors|json|csv|txt|pkl|pickle|npz?|ya?ml|log)\b"
        ),
        "<file>",
    ),
    (re.compile(r"\(line (\d+): .*\)"), r"(line \1)"),
    (re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`"), "'…'"),
)


def scrubbed(text: str) -> str:
    """Return a text without what could be private.

    Example:
        >>> scrubbed("total grows (line 7: total += loss), saved to /home/me/run 1/best.pt, '/data/x.csv' and losses.json")
        "total grows (line 7), saved to <path>, '…' and <file>"
        >>> scrubbed("runs/secret/best.pt, secret/x.csv, 3.5 samples/s")
        '<path>, <file>, 3.5 samples/s'
    """
    for pattern, instead in _PRIVATE:
        text = pattern.sub(instead, text)
    return text


def report(sessions: Iterable[Session], histories: Iterable[History], error: BaseException | None = None) -> str:
    """Return the report about models with a plan, what was measured, and the last error, if any."""
    parts = [
        ["memlab bug report", *described()],
        *([*_of_model(each.workload.model), *_of_session(each)] for each in sessions),
        *([*_of_batch(each), *_of_rows(each)] for each in histories),
        [*_of_error(error)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _of_model(model: nn.Module) -> Iterator[str]:
    parameters = list(model.parameters())
    size = format_bytes(sum(p.numel() * p.element_size() for p in parameters))
    yield f"model: {type(model).__name__}, {sum(p.numel() for p in parameters):,} parameters, {size}, {_places(parameters)}"
    kinds: Counter[str] = Counter()
    for module in model.modules():
        own = [f"{name} {_form(p)}" for name, p in module._parameters.items() if p is not None]
        kinds[f"{type(module).__name__}{f' ({_LIST.join(own)})' if own else ''}"] += 1
    for kind, count in kinds.most_common(_MOST_KINDS):
        yield f"  {count:>4} × {kind}"
    if len(kinds) > _MOST_KINDS:
        yield f"  and {len(kinds) - _MOST_KINDS} kinds of modules more"


def _places(parameters: Iterable[torch.Tensor]) -> str:
    return ", ".join(sorted({f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}" for p in parameters}))


def _form(tensor: torch.Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{frozen}"


def _of_session(session: Session) -> Iterator[str]:
    for optimizer in session.workload.optimizers:
        kinds = sorted({type(value).__name__ for state in optimizer.state.values() for value in state.values()})
        settings = ", ".join(sorted(name for name in optimizer.param_groups[0] if name != "params"))
        yield f"optimizer: {type(optimizer).__name__}, {len(optimizer.param_groups)} groups ({settings}), state of {', '.join(kinds) or 'nothing yet'}"
    yield f"plan: {session.plan.label}, after {session.steps} steps"
    yield from (f"  {scrubbed(str(entry))}" for entry in session.log[-_MOST_ENTRIES:])


def _of_batch(history: History) -> Iterator[str]:
    if history.batch is not None:
        leaves = tree_leaves((history.batch.args, dict(history.batch.kwargs)))
        forms = (_form(leaf) if isinstance(leaf, torch.Tensor) else type(leaf).__name__ for leaf in leaves)
        yield f"batch: {', '.join(forms)}"


def _of_rows(history: History) -> Iterator[str]:
    for row in history.comparison.measurements if history.comparison is not None else ():
        predicted = history.predicted.get(row.plan)
        expected = "" if predicted is None else f", predicted {format_bytes(predicted.needed_bytes)}"
        yield f"measured: {row.plan}: {format_bytes(row.peak_allocated_bytes)}{expected}, {row.samples_per_second:.3g} samples/s"
    yield from (
        f"  {scrubbed(event)}" for event in (history.comparison.events if history.comparison is not None else ())
    )


def _of_error(error: BaseException | None) -> Iterator[str]:
    if error is None:
        return
    places = [place for place, _ in groupby(_place(frame) for frame in traceback.extract_tb(error.__traceback__))]
    is_own = isinstance(error, (MemlabError, torch.OutOfMemoryError)) or any(
        place.startswith("memlab/") for place in places[-1:]
    )
    yield f"last error: {type(error).__name__}{f': {scrubbed(str(error))}' if is_own else ''}"
    yield from (f"  {place}" for place in places)


def _place(frame: traceback.FrameSummary) -> str:
    """Where a frame is, in packages that everybody has."""
    parts = PurePath(frame.filename).parts
    start = next((at for at, part in enumerate(parts) if part in _OWN and "site-packages" in parts[:at]), None)
    if start is None and frame.filename.startswith(_ROOT):
        start = len(PurePath(_ROOT).parts) - 1
    return "code that is not shown" if start is None else f"{'/'.join(parts[start:])}:{frame.lineno} {frame.name}"


def last_error() -> BaseException | None:
    """Return the error that ended the last cell that failed, as IPython keeps it."""
    return getattr(sys, "last_value", None)
