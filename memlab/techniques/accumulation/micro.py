"""One model call run as micro-batches: first pass, backward, replay. See `accumulation` for the rules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from memlab.errors import MemlabError, RefusalError, SessionError
from memlab.runtime import hooks
from memlab.runtime.aliases import KEEP_WHOLE, Aliases
from memlab.runtime.autocast import CallContext, without_autocast
from memlab.runtime.fingerprints import Fingerprint, are_others, fingerprints, other_results
from memlab.runtime.graphs import (
    are_batched,
    asks_for_gradient,
    functions_of_users,
    hooks_on_saved_tensors,
    nodes_of,
    sequence_nr,
    uses_of,
)
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.lazy import LazyTensor, Waiting, may_be_read, real, requires_grad, with_graph
from memlab.runtime.modules import Modes, parameters_made
from memlab.runtime.reach import has_backward_hooks
from memlab.runtime.rng import Randomness, is_generator
from memlab.runtime.surroundings import Surroundings
from memlab.techniques.accumulation.escapes import earlier_graph
from memlab.techniques.accumulation.merge import closed
from memlab.techniques.accumulation.micro_inputs import MicroInputs
from memlab.techniques.accumulation.micro_outputs import Joined, MicroOutputs
from memlab.techniques.accumulation.split import Call, Division, Outputs
from memlab.techniques.accumulation.verdict import SplitVerdict, making, unjudged

_FIELD = "accumulation"
# scale of the inner backward under a loop's own fp16, until its scaler has shown its own
_FIRST_LOOP_SCALE = 2.0**16


@dataclass
class Learnt:
    """Facts learnt from one call of a model for the next."""

    fused: bool | None = None  # whether the model returns its loss; None before the first call
    reads_outputs: bool = False  # the loop has looked at a large output, so they are kept from then on
    loop_scale: torch.Tensor | float = _FIRST_LOOP_SCALE  # factor by which the loop scaled its loss last
    updates: int = 0  # optimizer steps so far; parameters of an earlier count are gone
    calls: int = 0
    # whether a call without gradients would do something else: its forward derives or sets hooks, or it is compiled,
    # and calls with and without gradients would be compiled each by itself
    needs_graph: bool = False
    # whether a backward pass runs code of the user's, which may read what the loop sets before it; None before the first call
    runs_code: bool | None = None
    # told of what is refused in a backward pass
    refused: Callable[[MemlabError], None] = lambda _refusal: None
    # outputs since the last step that are computed only when the loop looks at them
    waiting: Waiting = field(default_factory=Waiting)

    def compute_waiting(self) -> None:
        """Compute, before an update, outputs that the loop may look at when the parameters they came from are gone."""
        waiting = self.waiting.taken()
        if waiting and not self.reads_outputs and may_be_read(waiting):
            for ref in waiting:
                real(ref())
            self.reads_outputs = True


class Gatherer(Protocol):
    """Storage for gradients of micro-batches until the loop's backward pass asks for them."""

    @property
    def originals(self) -> Sequence[torch.Tensor]:
        """Return what the outer graph derives by."""

    @property
    def aliases(self) -> Sequence[Any]:
        """Holders of the gathered gradients, as their `grad`."""

    @property
    def device(self) -> torch.device:
        """Return where the model is run."""

    def in_place(self) -> AbstractContextManager[None]:
        """Context in which micro-batches run, and their gradients gather."""

    def originals_in_place(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Context in which micro-batches run on what the outer graph derives by, which it gives."""

    def originals_untouched(self, model_name: str) -> AbstractContextManager[None]:
        """Context of one backward pass."""

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Hand over what has been gathered, one for each of `originals`."""


class MicroRun:
    """One split model call: its micro-batches, and what is needed to run one of them again.

    Over 300 lines: the first pass, the backward pass and repetitions work on the same micro-batches and random states.
    """

    def __init__(
        self,
        model: nn.Module,  # what errors name, and whose parameters are aliased where no gatherer is given
        call: Any,  # the model call below accumulation
        division: Division,  # the micro-batches
        learnt: Learnt,  # what earlier calls taught; updated here
        random_states: list[Randomness] | None = None,  # of an earlier run, to be repeated; None for a first run
        gatherer: Gatherer | None = None,  # where gradients gather; None for aliases of the model's parameters
        # of the judge: how the rest of what the parts give is put together; None where nobody looked
        verdict: SplitVerdict | None = None,
        per_part: tuple[type[nn.Module], ...] = (),  # kinds of modules whose buffers each part updates by itself
        check: Callable[[Surroundings], None] = lambda _: None,  # raises where the verdict is of another call
        *,
        refuses_effects: bool = False,  # whether what a part leaves beside its output is refused, as nobody can put it together
    ) -> None:
        self._model = model
        self._call = call
        self._division = division
        self._learnt = learnt
        self._repeats = random_states is not None
        self._random_states = random_states or []
        self._updates = learnt.updates
        self._context = CallContext()
        self._aliases: Gatherer = gatherer if gatherer is not None else Aliases(model)
        self._inputs = MicroInputs(division)
        self._gathered = MicroOutputs(division, verdict, repeats=self._repeats)
        # the gradients that the first pass has gathered; a graph that is kept is run again
        self._is_handed_over = False
        self._kept: tuple[Call, Outputs] | None = None  # the last micro-batch, with its graph
        self._fused = False
        self._inner_scale: torch.Tensor | float = 1.0
        self._looked_at: list[Any] | None = None
        self._verdict = verdict
        self._per_part = per_part
        self._check = check
        self._snapshot: Surroundings | None = None
        self._untouched: Surroundings | None = None  # the same, where nobody has judged
        self._modes: Modes | None = None
        # by number of a micro-batch that is to run again, what it gave; empty where that is not compared
        self._given: dict[int, dict[int, Fingerprint]] = {}
        self._refuses_effects = refuses_effects
        self._leaves_something = False  # beside its output
        self._under_way = hooks.calls_under_way()
        self._leading: list[weakref.ref[torch.Tensor]] = []  # outputs that others are, or may be, computed from

    def outputs(self) -> Any:
        """Run all micro-batches and return what the model would have returned; leave elsewhere what it would have left."""
        leaves = self._leaves()
        for position, joined in self._gathered.waiting().items():
            leaves[position] = self._lazy(position, joined)
        self._gathered.sharing.apply(leaves)
        if self._snapshot is not None:
            self._snapshot.register()
        self._gathered.leave(leaves)
        return self._gathered.template.rebuild(leaves)

    def _leaves(self) -> list[Any]:
        values = _SplitCall.apply(self, *self._inputs.whole().values(), *self._aliases.originals)  # type: ignore[no-untyped-call]
        handed_out = {p: v for p, v in zip(self._gathered.eager, values, strict=True) if v.requires_grad}
        possible = handed_out.keys() if len(handed_out) > 1 else frozenset()
        leading = possible if self._verdict is None else possible & self._verdict.leading
        self._leading = [weakref.ref(handed_out[position]) for position in leading]
        return self._gathered.leaves(values)

    def _lazy(self, position: int, joined: Joined) -> LazyTensor:
        def make() -> LazyTensor:
            return LazyTensor(joined.whole_shape(), joined.dtype, joined.device, lambda: self._look(position))

        sources = [*self._inputs.whole().values(), *self._aliases.originals] if joined.differentiable else []
        lazy: LazyTensor = with_graph(make, sources, lambda gradient: self._seen(position, gradient))
        self._learnt.waiting.add(lazy)
        return lazy

    def _look(self, position: int) -> torch.Tensor:
        """Compute an output the loop looks at after all, connected to the graph by replay."""
        if self._looked_at is None:
            _, self._looked_at = self._looked()
        value: torch.Tensor = self._looked_at[position]
        return value

    def _seen(self, position: int, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients from that of an output that something has looked at past Python, by a replay of its own."""
        with torch.enable_grad():
            again, _ = self._looked()
        return again.answer([gradient if each == position else None for each in again._gathered.eager])

    def _looked(self) -> tuple[MicroRun, list[Any]]:
        """The call once more, and its outputs."""
        self._learnt.reads_outputs = True
        if self._updates != self._learnt.updates:
            raise SessionError(
                "an output of a split batch was read after optimizer.step(), when its parameters were gone: "
                "read it before the step (from the next batch on memlab keeps it)"
            )
        again = self._again()
        again._under_way, again._context = self._under_way, self._context
        with self._random_kept(), self._context.entered(), self._as_before(), hooks.within(self._under_way):
            leaves = again._leaves()
        return again, leaves

    def _again(self) -> MicroRun:
        """The same call once more, with a graph to its outputs."""
        return MicroRun(
            self._model, self._call, self._division, self._learnt,
            random_states=self._random_states, verdict=self._verdict, per_part=self._per_part,
        )  # fmt: skip

    # -- first pass ----------------------------------------------------------------------------

    def first_pass(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run every micro-batch once. Returns the joined outputs, and those among them that have no gradient."""
        self._modes = Modes(self._model.modules())
        self._learnt.calls += not self._repeats
        with self._aliases.in_place():
            if self._verdict is not None:
                self._snapshot = Surroundings(self._model, self._verdict.changing, without_buffers_of=self._per_part)
                self._check(self._snapshot)
            untouched = self._untouched = self._unjudged_surroundings() if self._refuses_effects else None
            try:
                for index in range(self._count):
                    self._first_run_of(index)
                    if untouched is not None:
                        self._check_untouched(untouched)
            except Exception:  # a Ctrl-C leaves what the call has done so far, as in a whole batch
                if self._snapshot is not None:
                    self._snapshot.restore(strict=False)
                raise
        return self._gathered.values()

    @property
    def _count(self) -> int:
        return len(self._division.micro_batches)

    def start_over(self) -> None:
        """Random states as they were before the first run."""
        self._random_states[0].restore()

    def _random_now(self) -> Randomness:
        own = self._verdict.generators if self._verdict is not None else ()
        return Randomness([*own, *filter(is_generator, self._division.micro_batches[0].leaves)])

    @contextmanager
    def _random_kept(self) -> Iterator[None]:
        """Leave random states as they are, also where memory runs out in a micro-batch that is run again."""
        now = self._random_now()
        try:
            yield
        finally:
            now.restore()

    def _first_run_of(self, index: int) -> None:
        if not self._repeats:
            if index and self._verdict is not None and not self._verdict.goes_on:
                self._random_states[0].restore_host()
            self._random_states.append(self._random_now())
        else:
            self._random_states[index].restore()
        is_last = index == self._count - 1
        keeps_graph = not self._repeats and (self._learnt.fused is not False or is_last)
        began = sequence_nr()
        with torch.set_grad_enabled(keeps_graph or self._learnt.needs_graph):
            micro_batch, outputs = self._run(index)
        is_looked_at = keeps_graph and (is_last or not index)  # one part, as the others are alike
        if is_looked_at and self._snapshot is not None and self._snapshot.derived():
            reason = earlier_graph(type(self._model).__name__, outputs.leaves, began, self._snapshot)
            if reason:
                raise RefusalError(_FIELD, reason, KEEP_WHOLE)
        self._gathered.sharing.note(outputs.leaves, self._before(micro_batch))
        if not keeps_graph:
            outputs = outputs.without_graph()
        if index == 0:
            self._choose_form(outputs)
        if not self._fused:
            self._given[index] = fingerprints(dict(enumerate(outputs.leaves)), self._learnt.calls)
        self._gathered.add(outputs, keeps_large=not self._fused or self._learnt.reads_outputs)
        if self._fused:
            loss, weight = outputs.leaves[outputs.loss], self._division.weights[outputs.loss][index]
            # large outputs die before the backward pass, as in a loop that keeps only the loss
            del outputs
            self._backward_of_loss(micro_batch, loss, weight)
        elif is_last and not self._repeats and not self._leaves_something:
            # else hooks in its graph may read what is put back below
            self._kept = (micro_batch, outputs)
        if self._snapshot is not None:
            self._snapshot.restore()
        if not self._fused:
            # casts that were cached without gradients must not meet a pass that needs them
            torch.clear_autocast_cache()

    def _run(self, index: int, inputs: Mapping[int, torch.Tensor] | None = None) -> tuple[Call, Outputs]:
        leaves = list(self._division.micro_batches[index].leaves)
        for position in self._inputs.positions:
            leaves[position] = leaves[position].detach().requires_grad_() if inputs is None else inputs[position]
        micro_batch = self._division.micro_batches[index].with_leaves(leaves)
        with parameters_made(self._model) as made:
            output = micro_batch.run(self._call)
        if made:
            raise RefusalError(_FIELD, making(type(self._model).__name__, made), KEEP_WHOLE)
        if self._snapshot is None:
            return micro_batch, Outputs.of(output)
        effects = self._snapshot.effects()
        self._leaves_something = bool(effects)
        self._gathered.note_left(effects)
        return micro_batch, Outputs.of(output, {name: closed(effect) for name, effect in effects.items()})

    def _unjudged_surroundings(self) -> Surroundings:
        """Return what is to stay as it is where nobody has judged what parts leave; hooks of the backward pass would leave it later."""
        for name, module in self._model.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                raise unjudged(f"{name or type(module).__name__} has hooks in the backward pass")
        return Surroundings(self._model, without_buffers_of=self._per_part)

    def _check_untouched(self, before: Surroundings) -> None:
        changed = next(iter(before.effects()), "")
        draws = self._random_states[0].host_differs()
        if changed or draws:
            before.restore(strict=False)
            self.start_over()
            done = (
                f"changes {changed}"
                if changed
                else "draws random numbers of Python or NumPy, which may be for all rows at once"
            )
            raise unjudged(f"the forward pass {done}")

    def _before(self, micro_batch: Call) -> dict[int, torch.Tensor]:
        """Return, by `id`, what tensors that were there before a micro-batch are for the batch."""
        found = {id(each): each for each in self._snapshot.tensors()} if self._snapshot is not None else {}
        found |= {id(alias): own for alias, own in zip(self._aliases.aliases, self._aliases.originals, strict=False)}
        whole = self._division.whole
        pairs = zip(micro_batch.leaves, whole.leaves, strict=True) if whole is not None else ()
        return found | {id(part): of for part, of in pairs if isinstance(of, torch.Tensor)}

    def _choose_form(self, outputs: Outputs) -> None:
        if self._learnt.runs_code is None:
            graph = [leaf for leaf in outputs.leaves if type(leaf) is torch.Tensor and leaf.grad_fn is not None]
            self._learnt.runs_code = bool(functions_of_users(nodes_of(graph)))
        if not self._repeats:
            self._learnt.fused = (
                outputs.loss >= 0
                and not self._runs_code
                and outputs.loss in self._division.weights
                and requires_grad(outputs.leaves[outputs.loss])
            )
            self._fused = self._learnt.fused
        if self._fused and self._context.scales_gradients:
            self._inner_scale = self._learnt.loop_scale

    @property
    def _runs_code(self) -> bool:
        """Return whether a backward pass runs code of the user's: it is to run in the loop's, where it may find something else set."""
        return self._learnt.runs_code or has_backward_hooks(self._model)

    def _backward_of_loss(self, micro_batch: Call, loss: torch.Tensor, weight: float) -> None:
        if weight:  # without a target the mean of this micro-batch is 0/0
            self._backward([loss], [torch.full_like(loss, weight) * self._inner_scale])
        self._inputs.gradients.append(self._inputs.gradients_of(micro_batch))

    def _backward(self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        with self._aliases.originals_untouched(type(self._model).__name__), without_autocast():
            torch.autograd.backward(tensors, gradients)

    # -- backward ------------------------------------------------------------------------------

    def backward_begins(self, roots: Sequence[Any], inputs: Sequence[Any] | None) -> None:
        """Refuse a pass in which the loop asks for the gradient of an output that others follow from, which is none of the graph's."""
        alive = [tensor for ref in self._leading if (tensor := ref()) is not None]
        for tensor in alive:
            by = asks_for_gradient(tensor, inputs)
            if by and any(number != tensor.output_nr for number in uses_of(tensor.grad_fn, roots)):
                name = type(self._model).__name__
                raise RefusalError(
                    _FIELD,
                    f"the loop asks for the gradient of a tensor from which {name} computes others ({by})",
                    KEEP_WHOLE,
                )

    def told(self, refusal: MemlabError) -> None:
        """Pass on what the backward pass is refused."""
        self._learnt.refused(refusal)

    def answer(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the whole inputs and of the parameters, from those of the joined outputs."""
        if are_batched(outer):
            name = type(self._model).__name__
            raise RefusalError(
                _FIELD,
                f"the loop takes several gradients of {name} in one pass (is_grads_batched, vectorize=True)",
                KEEP_WHOLE,
            )
        is_differentiated = torch.is_grad_enabled()  # as autograd has it under create_graph
        with deferred_interrupts(), hooks.within(self._under_way):
            return (self.differentiable_gradients if is_differentiated else self.gradients)(outer)

    def gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The same, without a graph."""
        wanted = {position: g for position, g in zip(self._gathered.eager, outer, strict=True) if g is not None}
        if self._fused and not self._is_handed_over:
            self._scale_gathered(wanted.pop(self._gathered.loss, None))
        if wanted:
            self._replay(wanted)
        inputs = self._inputs.take()
        self._kept, self._is_handed_over = None, self._fused
        self._gathered.drop_parts()
        return (*inputs, *self._aliases.take_gradients())

    def _scale_gathered(self, loss_gradient: torch.Tensor | None) -> None:
        if loss_gradient is None:
            self._inputs.gradients = []
            self._aliases.take_gradients()
            return
        if self._context.scales_gradients:
            self._learnt.loop_scale = loss_gradient.detach()
        factor = loss_gradient / self._inner_scale
        if factor.device.type == "cpu" and float(factor) == 1.0:
            return
        gathered = [alias.grad for alias in self._aliases.aliases if alias.grad is not None]
        gathered += [gradient for part in self._inputs.gradients for gradient in part.values()]
        for gradient in gathered:
            # gradients of parameters that rest on the host are there
            gradient.mul_(factor.reshape(()).to(gradient.device, gradient.dtype))

    def differentiable_gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The same, to be differentiated again: every micro-batch runs once more, on the parameters themselves.

        What was gathered stays for the backward pass that follows.
        """
        wanted = {position: g for position, g in zip(self._gathered.eager, outer, strict=True) if g is not None}
        self._check_replay(wanted)
        whole = {position: tensor.view_as(tensor) for position, tensor in self._inputs.whole().items()}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        with (
            self._random_kept(),
            self._aliases.originals_in_place() as parameters,
            self._context.entered(),
            self._as_before(),
        ):
            for index in range(self._count):
                self._random_states[index].restore()
                _, outputs = self._run(index, self._inputs.part_of(whole, index))
                self._require_same(index, outputs, wanted)
                pairs += self._gathered.shares(outputs, wanted, index)
                if self._snapshot is not None:
                    self._snapshot.restore(strict=False)
        return torch.autograd.grad(
            [tensor for tensor, _ in pairs], [*whole.values(), *parameters], [share for _, share in pairs],
            create_graph=True, allow_unused=True,
        )  # fmt: skip

    def _replay(self, wanted: Mapping[int, torch.Tensor]) -> None:
        self._check_replay(wanted)
        order = [*range(self._count)]
        if self._kept is not None:
            order.insert(0, order.pop())  # its graph is there: use it first, so that it is freed first
        replayed: dict[int, dict[int, torch.Tensor]] = {}
        runs_code = self._runs_code
        with self._random_kept(), self._aliases.in_place(), self._context.entered(), torch.enable_grad():
            now = Surroundings(self._model) if runs_code else None
            with nullcontext() if runs_code else self._as_before():
                for index in order:
                    replayed[index] = self._replay_one(index, wanted, self._as_before if runs_code else nullcontext)
                    if now is not None:
                        self._check_code(now)
                    elif self._snapshot is not None:
                        self._snapshot.restore(strict=False)
        self._inputs.add(replayed)

    def _check_code(self, now: Surroundings) -> None:
        """Refuse what code of the user's changes in a backward pass: it would once for each micro-batch."""
        if changed := next(iter(now.effects()), ""):
            now.restore(strict=False)
            name = type(self._model).__name__
            raise RefusalError(
                _FIELD,
                f"the backward pass of {name} changes {changed}, and would once for each micro-batch",
                KEEP_WHOLE,
            )

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restore what the forward reads beside its arguments, as it was before the call."""
        modes = nullcontext() if self._modes is None else self._modes.entered()
        if self._snapshot is None:
            with modes, nullcontext() if self._untouched is None else self._untouched.as_before():
                yield
            return
        statistics = Surroundings(self._model, complete=True) if self._per_part else None
        try:
            with self._snapshot.as_before(), modes:
                yield
        finally:
            if statistics is not None:
                statistics.restore(strict=False)

    def _replay_one(
        self, index: int, wanted: Mapping[int, torch.Tensor], as_before: Callable[[], AbstractContextManager[None]]
    ) -> dict[int, torch.Tensor]:
        if self._kept is not None and index == self._count - 1:
            (micro_batch, outputs), self._kept = self._kept, None
        else:
            self._random_states[index].restore()
            with as_before():
                micro_batch, outputs = self._run(index)
            self._require_same(index, outputs, wanted)
        pairs = self._gathered.shares(outputs, wanted, index)
        del outputs
        if pairs:
            self._backward([tensor for tensor, _ in pairs], [share for _, share in pairs])
        return self._inputs.gradients_of(micro_batch)

    def _require_same(self, index: int, outputs: Outputs, wanted: Mapping[int, torch.Tensor]) -> None:
        """Refuse gradients of a micro-batch that gives other values than in its first run."""
        given = {position: each for position, each in self._given.get(index, {}).items() if position in wanted}
        if are_others(given, dict(enumerate(outputs.leaves))):
            raise other_results(_FIELD, type(self._model).__name__)

    def _check_replay(self, wanted: Mapping[int, torch.Tensor]) -> None:
        if not all(map(self._gathered.has_rule, wanted)):
            raise RefusalError(
                _FIELD,
                f"the loop trains on a scalar of {type(self._model).__name__} that is no mean or sum over rows or targets",
                KEEP_WHOLE,
            )
        if self._updates != self._learnt.updates and self._kept is None:
            raise SessionError(
                "backward() through the outputs of a split batch came after optimizer.step(): call it before the step"
            )


class _SplitCall(torch.autograd.Function):
    """The outer graph's view of a split call: whole inputs and parameters in, joined outputs out."""

    @staticmethod
    def forward(ctx: Any, run: MicroRun, *_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, constants = run.first_pass()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        # autograd lets go of what is saved when a backward pass is over, unless it is told to retain the graph
        holder: Any = torch.empty(0, device="cpu")
        # the loop's own hooks on saved tensors would give back another one
        is_hooked = hooks_on_saved_tensors() is not None
        ctx.run = run if is_hooked else None
        holder.run = run
        ctx.save_for_backward(holder)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (holder,) = ctx.saved_tensors  # torch's own error where the graph is gone
        run = ctx.run or holder.run
        try:
            return (None, *run.answer(gradients))
        except MemlabError as refusal:
            run.told(refusal)
            raise
