"""Ctrl-C at any line of a training loop, and what must hold after it.

A loop of a few steps is run once to count the lines that it takes in memlab, in torch and in its own code. Then it is run
again and again, each time with a Ctrl-C at another one of them: what training has changed must be what it is after some
number of whole steps, and the loop must go on from there as if it had never been left.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, Literal

import torch
import torch._dynamo.callback  # as any cell may have: memlab then asks torch's compiler to be told
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import memlab
from memlab import Workload, fit
from memlab.measuring.operator_effects import OperatorEffect, effect_of
from memlab.runtime.interrupts import Listener
from memlab.runtime.loop_mode import LoopMode
from memlab.runtime.tree import tensors_in
from memlab.session import Session
from tests.helpers.ctrl_c import interrupt
from tests.helpers.fingerprint import differing, fingerprint

_MEMLAB, _TORCH = f"{Path(memlab.__file__).parent}/", f"{Path(torch.__file__).parent}/"
_PROFILER = f"{_TORCH}autograd/profiler.py"
_STEPS = 3
_BLOCK = 64 * 64  # numbers in a block of `Net`, which is updated when the larger head has been
Rescue = Literal[False, True, "needed"]

PLANS = (
    "",
    "--accumulate 2",
    "--checkpoint",
    "--checkpoint selective",
    "--offload optimizer",
    "--offload activations",
    "--offload params",
    "--offload optimizer,activations,params",
    "--release-grads",
    "--release-grads --offload optimizer",
    "--release-grads --offload params,optimizer --checkpoint",
    "--release-grads --precision pure-bf16",
    "--release-grads --accumulate 2",
    "--adam8bit",
    "--adam8bit --offload optimizer",
    "--optim adafactor",
    "--optim sgd",
    "--optim lion8bit",
    "--optim adamw4bit",
    "--optim apollo",
    "--bf16",
    "--fp16",
    "--precision pure-bf16",
    "--precision pure-bf16 --adam8bit --offload optimizer,params",
    "--accumulate 2 --checkpoint --bf16 --offload optimizer,activations",
    "--chunk-loss",
    "--tile 2",
    "--lora r=4",
    "--lora r=4 --accumulate 2 --checkpoint --adam8bit --offload optimizer",
)
# moments are rounded at random, from a generator of memlab's own: an update that is done again draws other numbers
_DRAWS = ("--release-grads --precision pure-bf16",)


class Net(nn.Module):
    """Repeats a block and has a large head, so every technique applies."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 4096, bias=False)  # large enough for --tile and --chunk-loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.norm(self.blocks(inputs))), targets)


class Short(TorchDispatchMode):
    """Has no memory for the update of the smaller weights while moments are on the device.

    It says so beforehand, as a `Ledger` does: an update that was thought to fit cannot be repeated.
    """

    capacity_bytes, live_bytes, watching = 1, 1, True

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_made = effect_of(func) == OperatorEffect.BIRTH and "optimizer" not in str(self._session.plan)
        if is_made and any(tensor.numel() == _BLOCK and not tensor.is_meta for tensor in tensors_in(out)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return out


class Loop:
    """A model in training under a plan, by a loop that may be left and entered again.

    Args:
        plan: flags.
        rescue: whether the session rescues the loop, and whether the first update needs it.
        zeroes: where the loop zeroes its gradients: "first" or "last" in a step.
    """

    def __init__(self, plan: str, *, rescue: Rescue, zeroes: str = "first") -> None:
        torch.manual_seed(0)
        self.model = Net().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._zeroes = zeroes
        self.losses: dict[int, float] = {}
        self.memory: AbstractContextManager[Any] = nullcontext()
        self.run(2)
        self.untouched = fingerprint(self.model, [self.optimizer])
        self.session = fit(Workload(self.model, self.optimizer), plan, rescue=bool(rescue))
        self.losses.clear()  # of other parameters, where the plan brings adapters: their updates are counted anew
        if rescue == "needed":
            self.memory = Short(self.session)

    @property
    def steps(self) -> int:
        """Whole steps so far, as the user's optimizer counts them."""
        counts = self.counts()
        assert len(counts) <= 1, f"parameters are updated {sorted(counts)} times"
        return next(iter(counts), 0)

    def counts(self) -> set[int]:
        """How often parameters were updated."""
        states = self.optimizer.state.values()
        return {int(state["step"]) for state in states if "step" in state}

    def run(self, steps: int) -> None:
        """Train on from where the optimizer has come to."""
        for number in range(self.steps, self.steps + steps):
            self.step(number)

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        inputs, targets = torch.randn(4, 64), torch.randint(0, 4096, (4,))
        if self._zeroes == "first":
            self.optimizer.zero_grad()
        loss = self.model(inputs, targets)
        loss.backward()
        with self.memory:
            self.optimizer.step()
        if self._zeroes == "last":
            self.optimizer.zero_grad()
        self.losses[number] = loss.item()

    def contents(self) -> dict[str, torch.Tensor]:
        """Copies of weights and moments, in the user's own form."""
        found = {f"weight {name}": value.clone() for name, value in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{name} {index}": v.clone() for name, v in state.items() if isinstance(v, torch.Tensor)}
        return found


class Untouched:
    """The same loop, never interrupted: what everything is after each of its steps."""

    def __init__(self, plan: str, *, rescue: Rescue, zeroes: str) -> None:
        loop = Loop(plan, rescue=rescue, zeroes=zeroes)
        self.contents: dict[int, dict[str, torch.Tensor]] = {}
        for _ in range(_STEPS + 3):
            self.contents[loop.steps] = loop.contents()
            loop.run(1)
        self.losses = loop.losses
        loop.session.undo()


def lines(loop: Loop, file: str = "") -> int:
    """How many lines the steps take at which a Ctrl-C may come."""
    with at_line(0, file) as reached:
        loop.run(_STEPS)
    return reached[0]


@contextmanager
def at_line(nth: int, file: str = "") -> Iterator[list[Any]]:
    """Press Ctrl-C at the n-th line, of those of a file if one is given; yields how many there were, and where it was."""
    reached: list[Any] = [0, ""]

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        here = frame.f_code.co_filename
        # a `with` of torch's profiler whose line is traced on the way out is not left at all, and an expression that is not
        # gone through to its end is closed where no error can arise; no signal comes there
        if here == _PROFILER or (not here.startswith((_MEMLAB, _TORCH)) and here != __file__):
            return None
        is_end = event == "return" and here.startswith(_MEMLAB) and frame.f_code.co_name != "<genexpr>"
        if here.endswith(file) and (event == "line" or is_end):
            reached[0] += 1
            if reached[0] == nth:
                reached[1] = _stack(frame)
                sys.settrace(None)
                interrupt()
                return None
        return trace

    is_collecting = gc.isenabled()
    gc.disable()  # errors in finalizers go nowhere
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(None)
        if is_collecting:
            gc.enable()


def _stack(frame: FrameType | None) -> str:
    names = []
    while frame is not None and frame.f_code.co_filename != __file__ and len(names) < 8:
        names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}({frame.f_code.co_name})")
        frame = frame.f_back
    if frame is not None:
        names.append(f"{frame.f_lineno}({frame.f_code.co_name})")
    return " < ".join(names)


def interrupted(
    plan: str, untouched: Untouched, nth: int, *, rescue: Rescue, zeroes: str, file: str = ""
) -> tuple[str, list[str]]:
    """Interrupt a loop at a line; where that was, and what does not hold after it."""
    loop = Loop(plan, rescue=rescue, zeroes=zeroes)
    exact = zeroes == "first" and plan not in _DRAWS
    wrong: list[str] = []
    with at_line(nth, file) as reached:
        try:
            loop.run(_STEPS)
        except KeyboardInterrupt:
            came = True
        else:
            came = reached[0] < nth or nth == 0  # the loop that was counted may have imported something
    if not came:
        wrong.append("no KeyboardInterrupt came out of the loop")
    wrong += _left_behind(loop)
    try:
        wrong += _is_whole(loop, untouched, exact=exact)
        loop.run(2)
        wrong += _left_behind(loop)
        wrong += _is_whole(loop, untouched, exact=exact)
        if exact:
            wrong += [f"loss {k}" for k, loss in loop.losses.items() if untouched.losses[k] != loss]
        loop.session.undo()
        wrong += _left_behind(None)
        wrong += differing(loop.untouched, fingerprint(loop.model, [loop.optimizer]))
        loop.memory = nullcontext()
        loop.run(1)
    except Exception as error:  # noqa: BLE001 - what the next cell would show
        wrong.append(f"the next cell: {type(error).__name__}: {error}")
    _clean(loop)
    return str(reached[1]), wrong


def _is_whole(loop: Loop, untouched: Untouched, *, exact: bool) -> list[str]:
    counts = loop.counts()
    if len(counts) > 1:  # none before the first update of adapters
        return [f"parameters are updated {sorted(counts)} times"]
    found, expected = loop.contents(), untouched.contents[loop.steps]
    if not exact:
        return []
    same = found.keys() == expected.keys()
    wrong = [name for name in expected if not same or not torch.equal(found[name], expected[name])]
    return [f"after {loop.steps} steps other: {', '.join(wrong[:3])}"] if wrong else []


def _left_behind(loop: Loop | None) -> list[str]:
    """What a broken off loop has left switched on in the process; as long as it may go on, it may be watched."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    modes = [mode for mode in _get_current_function_mode_stack() if loop is None or not isinstance(mode, LoopMode)]
    handler = signal.getsignal(signal.SIGINT)
    left = {
        "function modes": modes,
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "hooks on saved tensors": hooks,
        "no grad": not torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled(),
        "casts of weights": torch.autocast_increment_nesting() + torch.autocast_decrement_nesting() - 1,
        "inference mode": torch.is_inference_mode_enabled(),
        "handler": handler is not signal.default_int_handler and (loop is None or not isinstance(handler, Listener)),
    }
    return [f"left: {name} {value}" for name, value in left.items() if value]


def _clean(loop: Loop) -> None:
    """Let nothing that was left behind go on into what follows."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while _get_current_function_mode_stack():
        torch.overrides._pop_mode()
    while _get_current_dispatch_mode_stack():
        torch.utils._python_dispatch._pop_mode()
    while torch._C._autograd._top_saved_tensors_default_hooks(False):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch.set_grad_enabled(True)
    while torch.autocast_increment_nesting() > 1:
        torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
    torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    with suppress(Exception):
        loop.session.undo()


def campaign(
    plan: str, count: int, *, rescue: Rescue, zeroes: str, seed: int = 0, file: str = ""
) -> dict[str, tuple[str, list[str]]]:
    """Interrupt a loop so often, at lines drawn at random; where something did not hold, and what."""
    untouched = Untouched(plan, rescue=rescue, zeroes=zeroes)
    loop = Loop(plan, rescue=rescue, zeroes=zeroes)
    total = lines(loop, file)
    loop.session.undo()
    drawn = random.Random(f"{seed} {plan}")
    failed = {}
    for nth in sorted(drawn.sample(range(1, total + 1), min(count, total))):
        where, wrong = interrupted(plan, untouched, nth, rescue=rescue, zeroes=zeroes, file=file)
        if wrong:
            failed[f"{nth}/{total}"] = (where, wrong)
    return failed


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    count = int(sys.argv[1])
    chosen = sys.argv[2:] or PLANS
    began = perf_counter()
    for plan in chosen:
        # SGD without momentum keeps nothing that could go elsewhere
        has_none_left = any(word in plan for word in ("optimizer", "release", "sgd"))
        needed: tuple[Rescue, ...] = () if has_none_left else ("needed",)
        for rescue in (*((False, True)[not plan :]), *needed):  # the user's own step is interrupted as torch has it
            for zeroes in ("first", "last"):
                failed = campaign(plan, count, rescue=rescue, zeroes=zeroes)
                print(
                    f"{plan!r} rescue={rescue} {zeroes}: {len(failed)} of {count} wrong ({perf_counter() - began:.0f} s)",
                    flush=True,
                )
                for at, (where, wrong) in [*failed.items()][:6]:
                    print(f"   {at} {where}\n      {'; '.join(wrong)[:300]}", flush=True)
