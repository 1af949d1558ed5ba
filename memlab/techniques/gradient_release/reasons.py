"""Notes of gradient release, and its reasons for refusing a loop with what to do instead."""

from __future__ import annotations

import sys
from traceback import walk_stack

from memlab.runtime.callers import module_of
from memlab.techniques.base import HOLDS_GRADIENTS
from memlab.techniques.gradient_release.watch import is_memlab, where

SPLIT = "with --accumulate gradients are complete after the last micro-batch, and held until then"
SHARED = "gradients of parameters that a second optimizer has got are kept from then on"
USE_ACCUMULATE = "hand over the whole batch and use --accumulate N, or leave --release-grads out"
LEAVE_OUT = "leave --release-grads out"
ADDED_UP = (
    "the loop calls backward() a second time before optimizer.step() (or one was broken off), and gradients add up over both",
    USE_ACCUMULATE,
)
FREED = "--release-grads has freed those of the last step"
FREED_EARLY = "--release-grads frees those of a step in its backward pass"
UPDATED = "; parameters have been updated with the gradients so far"
LEAVE_OUT_BEFORE = "leave it out, or %memfit undo, before a step whose gradients are looked at"
LATER_USE = "the loop's code may use gradients in a later step ({use}), when they are gone"
USED_BETWEEN = "the loop uses gradients between backward() and optimizer.step()"
CLIPPED = (
    "the loop takes the norm of all gradients (to clip them, or to show it), which is not known before the backward pass is over",
    f"leave that out, or {LEAVE_OUT}",
)
# in names of functions: torch's, and those that libraries call theirs by
_BY_THE_NORM_OF_ALL = ("clip_grad_norm", "get_grad_norm", "get_total_norm")
CLOSURE = ("the loop hands optimizer.step() a closure, which may run several times", LEAVE_OUT)
SCALED = (
    "the loop uses a GradScaler, which must see all gradients before any parameter is updated",
    "use bf16 without a scaler",
)
OTHER_MOMENTS = (
    "the loop changes or loads the optimizer's state between backward() and step(), when it would be updated",
    f"do that before the forward pass or after step(), or {LEAVE_OUT}",
)
WRITTEN_LATER = (
    "something writes to gradients once they are complete, as DistributedDataParallel does, when they would be gone",
    LEAVE_OUT,
)
HELD = (f"{HOLDS_GRADIENTS}, which would be freed under it", LEAVE_OUT)


def watching(steps: int) -> str:
    """Say what becomes of gradients in the first steps of a loop."""
    first = (
        "step of the loop is watched and keeps its"
        if steps == 1
        else f"{steps} steps of the loop are watched and keep their"
    )
    return f"the first {first} gradients; from then on they are freed in the backward pass"


def what_is_done() -> tuple[str, str]:
    """Return reason and way out for whoever touches a gradient now, from the names of the functions on the stack."""
    names, clips = [], False
    for frame, _ in walk_stack(sys._getframe(1)):
        home = module_of(frame)
        clips |= any(name in frame.f_code.co_name for name in _BY_THE_NORM_OF_ALL)
        if not is_memlab(frame):
            names.append(frame.f_code.co_name)
        if names[-1:] == ["step"] and home.startswith("torch.optim."):
            return CLOSURE  # the update itself looks, within a step that began before this plan
    if clips:
        return CLIPPED
    if any("unscale" in name for name in names):
        return SCALED
    if "zero_grad" in names:
        return "the loop drops gradients after backward() without a step", LEAVE_OUT
    return f"{USED_BETWEEN}{where()}, when they are gone", LEAVE_OUT
