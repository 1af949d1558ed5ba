"""Activation checkpointing of a live model, on and off: repeated blocks, or parts of a model that repeats none.

The forward of each part is replaced by one that runs it under `torch.utils.checkpoint.checkpoint(use_reentrant=False)`;
`rerun` sees to it that running it again gives what the first run gave and changes nothing. Frameworks' own switches are not
used: Transformers' enable/disable pair leaves an embedding hook behind at each round.

1. A model whose layers lie in repeated blocks for the most part is recomputed block by block.
2. In any other, parts are cut anew by what they keep, in the first training call of the model (`segments`, `look`).
3. With a budget, the first training forward of a batch's shape recomputes every block, and runs each once more to see
   what it would keep; from the next forward on, those that the `budget` chose are recomputed.
4. A part that does not compute the same when it is run again is left alone, and said.
5. Compiled code is told by its compiler's own budget what to recompute (`compiled`).

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import RefusalError
from memlab.plan import Plan
from memlab.runtime.autocast import autocast_as_before
from memlab.runtime.backward import around_backward_passes
from memlab.runtime.graphs import are_saved_by_hooks_of_the_loop, why_as_written
from memlab.runtime.hooks import is_compiled
from memlab.runtime.mechanisms import SeenInCalls
from memlab.runtime.modules import CacheOff, cache_off, refuse_kept_weights, repeated_blocks
from memlab.runtime.rng import Randomness
from memlab.runtime.stand_ins import method_of, stand_in
from memlab.runtime.surroundings import Surroundings
from memlab.runtime.workload import Workload
from memlab.techniques.base import Description, ModelCall, Reduces, Technique, Traits
from memlab.techniques.checkpointing import segments
from memlab.techniques.checkpointing.budget import Budget
from memlab.techniques.checkpointing.compiled import CompiledParts
from memlab.techniques.checkpointing.kept import Kept, kept_by
from memlab.techniques.checkpointing.look import Look
from memlab.techniques.checkpointing.rerun import Part, Run, WriteWatch, is_within_another, recomputed
from memlab.units import format_bytes

# of a model's layers: where fewer lie in repeated blocks, other parts are recomputed instead
_LEAST_IN_BLOCKS = 0.5


class ActivationCheckpointing(Technique, SeenInCalls):
    """Recompute activations in the backward pass: those of repeated blocks, or of parts of a model that repeats none.

    Known limitations: what a part reads and changes outside of its modules, its arguments and the usual random states (a
    global counter, a clock) is not put back; where that changes its result in the first training call, the part is left alone.
    Where a loop calls layers of the model and never the model itself, parts stay as they are cut before anything is measured.

    Over 300 lines: a sixth is words of its settings; what is seen in the first call decides how each later one runs.
    """

    field = "checkpointing"
    traits = Traits(Reduces.ACTIVATIONS)
    descriptions = (
        Description(
            flags="--checkpoint",
            saves="activations inside of repeated blocks, or of large parts of a model without such blocks",
            costs="one more forward pass of the blocks",
            exactness="same gradient, dropout and BatchNorm included",
            gives_nothing="the peak is in the loss or in the optimizer step; refused where no part holds more than one layer",
        ),
        Description(
            flags="--checkpoint every:N",
            saves="the same for one block in N",
            costs="the same ÷ N",
            exactness="same gradient, dropout and BatchNorm included",
            gives_nothing="as above",
        ),
        Description(
            flags="--checkpoint selective",
            saves="results that are cheap to compute again; matrix products, convolutions and attention are kept",
            costs="norms, activations and masks once more",
            exactness="same gradient, dropout and BatchNorm included",
            gives_nothing="as above",
        ),
        Description(
            flags="--checkpoint budget:SIZE",
            saves="activations inside of as many blocks as needed, so that blocks keep at most SIZE of a micro-batch",
            costs="the least recomputation that is enough",
            exactness="same gradient, dropout and BatchNorm included",
            gives_nothing="SIZE is more than the blocks keep anyway; refused where recomputing all of them is not enough",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._model: weakref.ref[nn.Module] = weakref.ref(nn.Module())
        self._name = ""
        self._budget: Budget | None = None
        self._look: Look | WriteWatch | None = None
        self._parts: list[Part] = []
        self._left_alone: list[Part] = []
        self._of_blocks = True
        self._compiled: CompiledParts | None = None
        self._is_settled = False
        self._patches: list[Callable[[], Any]] = []
        self._cache_off = CacheOff(self.field)
        self.learns_from_calls = plan.checkpointing.budget_bytes is not None

    @classmethod
    def setting(cls, plan: Plan) -> Any:
        # tiles lie below: a block may be what is tiled, and keeps another number of bytes under it, as in another precision
        return plan.checkpointing, plan.tiling, plan.precision if plan.checkpointing.budget_bytes is not None else None

    def check(self, workload: Workload) -> None:
        if is_compiled(workload.model):
            self._check_compiled(workload)
            return
        blocks = main_blocks(workload.model)
        if not blocks and not segments.first_parts(workload.model):
            raise RefusalError(
                self.field,
                f"no part of {workload.name} can be recomputed: none holds more than one layer, and a layer keeps its input "
                f"either way",
                "use --accumulate N to hold fewer activations at a time",
            )
        scripted = (name for name, each in workload.model.named_modules() if isinstance(each, torch.jit.ScriptModule))
        if (name := next(scripted, None)) is not None:
            raise RefusalError(
                self.field,
                f"{name or 'the model'} is code of torch.jit, whose state cannot be put back to run it again",
                "use --accumulate N or --offload activations",
            )
        if any(getattr(block, "gradient_checkpointing", False) for block in blocks):
            raise RefusalError(
                self.field,
                f"{workload.name} already checkpoints its blocks by its own switch",
                "call model.gradient_checkpointing_disable() first to let memlab do it",
            )

    def _check_compiled(self, workload: Workload) -> None:
        if self.plan.checkpointing != "full":
            raise RefusalError(
                self.field,
                f"{workload.name} is compiled, and its compiler chooses what is recomputed",
                "use --checkpoint, or train it uncompiled",
            )
        CompiledParts(workload.model, workload.name)

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        model = workload.model
        self._model, self._name = weakref.ref(model), workload.name
        self._compiled = CompiledParts(model, workload.name) if is_compiled(model) else None
        if self._compiled is not None:
            self.notes[:] = ["recomputed as the compiler chooses, which keeps a tenth of what it would keep"]
            return
        if self.plan.checkpointing.budget_bytes is not None:
            self._budget = Budget(self.plan.checkpointing.budget_bytes, workload.name)
            undo.callback(setattr, self, "_budget", None)
        around_backward_passes(self._around_backward, undo)
        blocks = main_blocks(model)
        self._of_blocks = bool(blocks)
        self._is_settled = False
        self.learns_from_calls = self.learns_from_calls or not blocks
        names = {id(module): name for name, module in model.named_modules()}
        parts = [segments.part_of(block, None, names) for block in blocks] or segments.first_parts(model)
        undo.callback(self._take_off)
        self._put_on(parts)

    def _around_backward(self, _roots: Sequence[Any], _inputs: Sequence[Any] | None) -> AbstractContextManager[None]:
        return autocast_as_before()

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        model = self._model()
        assert model is not None
        if self._compiled is not None:
            return self._compiled.call(call, args, kwargs)
        refuse_kept_weights(self.field, model, self._name)
        options = self._cache_off.options(model, self._name, kwargs)
        with cache_off(model, options):
            if not self._is_settled:
                return self._first(model, call, args, options)
            if self._budget is None:
                return call(*args, **options)
            with self._budget.applied(args, options) as budget:
                output = call(*args, **options)
            self.notes[:] = [*budget.notes, *self._said_of_parts()]
        return output

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        self._cache_off.step_ended()

    def trial_over(self) -> None:
        if self._budget is not None:
            self._budget.forget()

    # -- which parts ---------------------------------------------------------------------------

    def _put_on(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts[:: self.plan.checkpointing.every])
        by_owner: dict[int, list[Part]] = {}
        for part in self._parts:
            by_owner.setdefault(id(part.owner), []).append(part)
        undo = _Repeatable(self._patches)
        for of_owner in by_owner.values():
            owner = of_owner[0].owner
            handler = self._whole(of_owner[0]) if of_owner[0].span is None else self._in_runs(owner, of_owner)
            stand_in(owner, "forward", handler, undo)

    def _take_off(self) -> None:
        for undo in reversed(self._patches):
            undo()

    def _first(self, model: nn.Module, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The first training call of the model, in which it is seen what parts write to, and what they keep.

        Raises:
            RefusalError: it writes to what parts were given without autograd's knowledge; nothing of the call is left behind.
        """
        first = self._first_of_blocks if self._of_blocks else functools.partial(self._first_of_any, model)
        if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            return first(call, args, kwargs)  # nothing is to be put back, and copies would be taken for the model's
        before = Surroundings(model)
        randomness = Randomness(before.generators)
        try:
            return first(call, args, kwargs)
        except RefusalError:
            before.restore(strict=False)
            randomness.restore()
            raise

    def _first_of_any(self, model: nn.Module, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._look = look = Look(model)
        try:
            with look.watching(model, args, kwargs):
                output = call(*args, **kwargs)
            self._refuse_later_writes(look)
        finally:
            self._look = None
        self._is_settled = True
        if look.root is not None:
            self._settle(model, segments.best_segments(look.root), args, kwargs)
        return output

    def _first_of_blocks(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._look = watch = WriteWatch()
        try:
            # no ExitStack: it would keep a refusal in a cycle with what the forward pass holds
            with watch, nullcontext() if self._budget is None else self._budget.applied(args, kwargs):
                output = call(*args, **kwargs)
            self._refuse_later_writes(watch)
        finally:
            self._look = None
        self._is_settled = True
        self.notes[:] = [*(self._budget.notes if self._budget is not None else []), *self._said_of_parts()]
        return output

    def _refuse_later_writes(self, watch: WriteWatch) -> None:
        if watch.wrote_past_autograd():
            raise RefusalError(
                self.field,
                f"the forward pass of {self._name} writes through .data to what a part of it has used, whose gradients would be others "
                "when it is computed again",
                "use --offload activations, or --accumulate N",
            )

    def _settle(
        self, model: nn.Module, chosen: segments.Segmentation, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Recompute the parts that were chosen, from the next call on."""
        names = {id(module): name for name, module in model.named_modules()}
        known = {(id(part.owner), part.span): part for part in self._parts}
        left_alone = [part for part in self._parts if part.why_not_again]
        parts: dict[tuple[int, tuple[int, int] | None], Part] = {}
        kept: list[tuple[Part, Kept]] = []
        for segment in chosen.segments:
            key = (id(segment.owner), segment.span)
            part = parts.setdefault(key, known.get(key) or segments.part_of(segment.owner, segment.span, names))
            kept.append((part, Kept(segment.freed_bytes, segment.cost, segment.inputs)))
        self._take_off()
        self._patches.clear()
        self._put_on(list(parts.values()))
        if self._budget is not None:
            self._budget.decide(args, kwargs, kept)
        said = self._budget.notes if self._budget is not None else [_words(chosen, self._parts, self._name)]
        self._left_alone = left_alone
        self.notes[:] = [*said, *self._said_of_parts()]

    def _said_of_parts(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for part in self._left_alone:
            by_reason.setdefault(part.why_not_again, []).append(part.name)
        return [f"{', '.join(names)} {reason}, and is not recomputed" for reason, names in by_reason.items()]

    # -- running them --------------------------------------------------------------------------

    def _whole(self, part: Part) -> Callable[..., Any]:
        original = method_of(part.owner, "forward")

        @functools.wraps(original)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return self._run(part, original, args, kwargs)

        return checkpointed

    def _in_runs(self, owner: nn.Module, parts: Sequence[Part]) -> Callable[..., Any]:
        original = method_of(owner, "forward")
        children = list(owner._modules.values())
        by_start = {part.span[0]: part for part in parts if part.span is not None}

        @functools.wraps(original)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            is_changed = not segments.is_plain_sequential(owner) or [*owner._modules.values()] != children
            if len(args) != 1 or kwargs or is_changed or not self._applies():
                return original(*args, **kwargs)
            (value,), place = args, 0
            del args
            while place < len(children):
                part = by_start.get(place)
                run = _one_after_another(children[place : place + 1] if part is None else part.members)
                value = run(value) if part is None else self._run(part, run, (value,), {})
                place = place + 1 if part is None else part.span[1]  # type: ignore[index] # a run of children
            return value

        return checkpointed

    def _applies(self) -> bool:
        """Return whether a call of a part is one that a backward pass follows, and that nothing looks through."""
        if torch.compiler.is_compiling() or why_as_written():
            return False
        model = self._model()
        is_training = model is not None and model.training and torch.is_grad_enabled() and not is_within_another()
        if not is_training or torch._C._get_tracing_state() is not None:
            return False
        if are_saved_by_hooks_of_the_loop():  # of several hooks torch calls the newest alone
            self.notes.once("nothing is recomputed within hooks of the loop's own on what is saved for backward")
            return False
        return True

    def _run(self, part: Part, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not self._applies() or part.why_not_again:
            return call(*args, **kwargs)
        self.was_reached = True
        again = functools.partial(recomputed, part, call, args, kwargs)
        if isinstance(self._look, Look):
            return self._look.part_runs(part, call, args, kwargs, lambda run: again(run=run))
        if self._budget is not None and not self._budget.recomputes(part):
            return call(*args, **kwargs)
        is_measured = self._budget is not None and self._budget.is_measuring
        then = functools.partial(self._measure, part, call) if is_measured else None
        output = again(watch=self._look, then=then, selective=self.plan.checkpointing == "selective")
        if part.why_not_again:
            self.notes.once(f"{part.name} {part.why_not_again}, and is not recomputed")
        return output

    def _measure(self, part: Part, call: Callable[..., Any], run: Run, saved: Sequence[torch.Tensor]) -> None:
        assert self._budget is not None
        with run.again():
            args, kwargs = run.arguments(saved)
            output, kept = kept_by(call, args, kwargs)
            del output
        self._budget.add(part, kept)


def main_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks a model repeats, where most of its layers lie in them; else none.

    Example:
        >>> tower = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        >>> len(main_blocks(tower))
        3
        >>> main_blocks(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)), tower))
        []
    """
    blocks = repeated_blocks(model)
    inside = {id(module) for block in blocks for module in block.modules() if module._parameters}
    layers = [id(module) for module in model.modules() if module._parameters]
    return blocks if len(inside) >= _LEAST_IN_BLOCKS * len(layers) else []


def _one_after_another(children: Sequence[Any]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for child in children:
            value = child(value)
        return value

    return run


def _words(chosen: segments.Segmentation, parts: Sequence[Part], name: str) -> str:
    if not chosen.segments:
        return f"nothing is recomputed: no part of {name} keeps what could be freed without holding as much again"
    kept, everything = format_bytes(chosen.kept_bytes), format_bytes(chosen.all_bytes)
    listed = f"{len(parts)} part{'' if len(parts) == 1 else 's'} recomputed: {kept} of {everything} kept between them"
    if len(parts) < len(chosen.segments):
        listed = f"{len(parts)} of {len(chosen.segments)} parts recomputed"
    return f"{listed} ({', '.join(part.name for part in parts[:6])}{', …' if len(parts) > 6 else ''})"


class _Repeatable(ExitStack):
    """Collects what takes changes back, to be called as often as needed: a change of plans may be taken back itself."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        super().__init__()
        self._calls = calls

    def callback(self, callback: Callable[..., Any], /, *args: Any, **kwds: Any) -> Callable[..., Any]:
        self._calls.append(functools.partial(callback, *args, **kwds))
        return callback
