"""Uses of gradients in a running loop's code, found before they happen.

Known limitations: those of `loop_reading`. What is called like torch's functions that read gradients is taken for one.
"""

from __future__ import annotations

import dis
from itertools import pairwise
from types import CodeType, FrameType

from memlab.runtime.loop_reading import functions_of_loop

# what a loop may do with a gradient that is gone: drop it, zero it, ask whether it is there
_HARMLESS = frozenset({"zero_", "detach_"})


def use_of_gradients(frame: FrameType) -> str | None:
    """Return where functions that run use gradients, or functions of the user's that these call; None for nowhere.

    Args:
        frame: the newest of those that run.

    Example:
        >>> def show(model):
        ...     return [weight.grad.norm() for weight in model.parameters()]
        >>> def train(model, steps):
        ...     for step in steps:
        ...         if step % 100 == 0:
        ...             show(model)
        ...         return use_of_gradients(sys._getframe())
        >>> import sys
        >>> train(None, [1])
        'show, line 2'
    """
    for function in functions_of_loop(frame):
        for code in function.inner():
            if (line := _line_of_use(code)) is not None:
                name = function.code.co_name
                return f"{name if name.isidentifier() else 'the cell'}, line {line}"
    return None


def _line_of_use(code: CodeType) -> int | None:
    line = None
    for step, following in pairwise(dis.get_instructions(code)):
        line = (step.positions and step.positions.lineno) or line
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"):
            continue
        name = step.argval
        is_called = step.opname == "LOAD_METHOD" or "NULL|self" in step.argrepr  # `torch.autograd.grad` is, no gradient
        is_asked_for = "NONE" in following.opname or (following.opname == "LOAD_CONST" and following.argval is None)
        if (
            name == "grad"
            and step.opname == "LOAD_ATTR"
            and not (is_called or is_asked_for)
            and following.argval not in _HARMLESS
        ):
            return line
        if name == "unscale_" or str(name).startswith("clip_grad"):
            return line
    return None
