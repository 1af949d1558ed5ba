"""One model call run as micro-batches: first pass, backward, replay. See `accumulation` for the rules."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from memlab.errors import RefusalError, SessionError
from memlab.runtime.aliases import Aliases
from memlab.runtime.autocast import AutocastState, without_autocast
from memlab.runtime.interrupts import uninterrupted
from memlab.runtime.lazy import LazyTensor, may_be_read, real
from memlab.runtime.rng import Randomness, is_generator
from memlab.runtime.surroundings import KEEP_WHOLE, Effect, Snapshot
from memlab.runtime.tree import Structure, flatten
from memlab.techniques.accumulation.judge import Verdict, start_of
from memlab.techniques.accumulation.merge import Chain, Join, Merge, UnsettledError, closed, opened
from memlab.techniques.accumulation.merge import equal as _is_same
from memlab.techniques.accumulation.split import Call, Layout, Outputs
from memlab.units import MIB

_FIELD = "accumulation"
# an output larger than this is computed only when the loop looks at it
LAZY_FROM_BYTES = 1 * MIB
# scale of the inner backward under a loop's own fp16, until its scaler has shown its own
_FIRST_LOOP_SCALE = 2.0**16


@dataclass
class Learnt:
    """Facts learnt from one call of a model for the next.

    Args:
        fused: whether the model returns its loss; None before the first call.
        reads_outputs: the loop has looked at a large output, so they are kept from then on.
        loop_scale: factor by which the loop scaled its loss last.
        updates: optimizer steps so far; parameters of an earlier count are gone.
        needs_graph: whether a call without gradients would do something else: its forward derives or sets hooks, or it is
            compiled, and calls with and without gradients would be compiled each by itself.
        waiting: outputs since the last step that are computed only when the loop looks at them.
    """

    fused: bool | None = None
    reads_outputs: bool = False
    loop_scale: torch.Tensor | float = _FIRST_LOOP_SCALE
    updates: int = 0
    needs_graph: bool = False
    waiting: list[weakref.ref[LazyTensor]] = field(default_factory=list)

    def foresee_reads(self) -> None:
        """Compute, before an update, outputs that the loop may look at when the parameters they came from are gone."""
        waiting = [lazy for ref in self.waiting if (lazy := ref()) is not None]
        self.waiting.clear()
        if waiting and not self.reads_outputs and may_be_read(waiting):
            for lazy in waiting:
                lazy.value()
            self.reads_outputs = True


@dataclass
class Joined:
    """One output, gathered over micro-batches.

    Args:
        join: where it is joined; None for scalars and values all micro-batches share.
        weights: one per micro-batch for a scalar, else None.
        rows: of each micro-batch.
        shape: shape of one part; where it is joined only the sum counts.
        sizes: size of each part where it is joined.
        parts: detached parts until a backward pass is over, empty when the output is computed on demand.
    """

    join: Join | None
    weights: list[float] | None
    rows: Sequence[int]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = False
    sizes: list[int] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)

    def value(self) -> torch.Tensor:
        if self.weights is not None:
            weighted = [part * weight for part, weight in zip(self.parts, self.weights, strict=True) if weight]
            return torch.stack(weighted).sum(0) if weighted else torch.zeros_like(self.parts[0])
        if self.join is None:
            return self.parts[0].clone()
        return self.join.of(self.parts, self.rows)

    def whole_shape(self) -> list[int]:
        assert self.join is not None
        return [*self.shape[: self.join.dim], sum(self.sizes), *self.shape[self.join.dim + 1 :]]

    def share(self, gradient: torch.Tensor, index: int, shape: torch.Size) -> torch.Tensor | None:
        """The part of the joined output's gradient that belongs to one micro-batch."""
        if self.weights is not None:
            return gradient * self.weights[index]
        if self.join is None:
            return gradient if index == 0 else None
        return self.join.share(gradient, index, self.sizes, self.rows, shape)


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

    def originals_in_place(self) -> AbstractContextManager[None]:
        """Context in which micro-batches run on what the outer graph derives by."""

    def originals_untouched(self, model_name: str) -> AbstractContextManager[None]:
        """Context of one backward pass."""

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Hand over what has been gathered, one for each of `originals`."""


class MicroRun:
    """One split model call: its micro-batches, and what is needed to run one of them again.

    Args:
        model: what errors name, and whose parameters are aliased where no gatherer is given.
        call: the model call below accumulation.
        micro_batches: the parts of the call.
        layout: along which dimension they were cut.
        weights: for each scalar output that has a rule, one weight per micro-batch.
        joins: for each output where it is joined, or None.
        learnt: what earlier calls taught; updated here.
        random_states: of an earlier run, to be repeated; None for a first run.
        gatherer: where gradients gather; None for aliases of the model's parameters.
        verdict: of the judge: how the rest of what the parts give is put together; None where nobody looked.
        per_part: kinds of modules whose buffers each part updates by itself.

    Attributes:
        is_done: its gradients were handed over, and cannot be had again.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Any,
        micro_batches: list[Call],
        layout: Layout,
        weights: Mapping[int, list[float]],
        joins: tuple[Join | None, ...],
        learnt: Learnt,
        random_states: list[Randomness] | None = None,
        gatherer: Gatherer | None = None,
        verdict: Verdict | None = None,
        per_part: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self._model = model
        self._call = call
        self._micro_batches = micro_batches
        self._layout = layout
        self._weights = weights
        self._joins = joins
        self._learnt = learnt
        self._repeats = random_states is not None
        self._random_states = random_states or []
        self._updates = learnt.updates
        self._autocast = AutocastState()
        self._aliases: Gatherer = gatherer if gatherer is not None else Aliases(model)
        self._inputs = [i for i, leaf in enumerate(micro_batches[0].leaves) if _requires_grad(leaf)]
        self._input_gradients: list[dict[int, torch.Tensor]] = []
        self._joined: dict[int, Joined] = {}
        self._eager: list[int] = []  # positions of outputs that were computed
        self._template: Outputs | None = None
        self.is_done = False
        self._kept: tuple[Call, Outputs] | None = None
        self._fused = False
        self._inner_scale: torch.Tensor | float = 1.0
        self._looked_at: list[Any] | None = None
        self._verdict = verdict
        self._per_part = per_part
        self._rows = [layout.rows_in(part) for part in micro_batches]
        self._snapshot: Snapshot | None = None
        self._spec: Structure | None = None
        self._places: list[tuple[Effect, int]] = []  # of each leaf left elsewhere
        self._plain: dict[int, list[Any]] = {}
        self._handed_out: list[weakref.ref[torch.Tensor]] = []

    def outputs(self) -> Any:
        """Run all micro-batches and return what the model would have returned; leave elsewhere what it would have left."""
        leaves = self._leaves()
        assert self._template is not None
        for position, joined in self._joined.items():
            if position not in self._eager:
                leaves[position] = self._lazy(position, joined)
        self._leave(leaves)
        return self._template.rebuild(leaves)

    def _leaves(self) -> list[Any]:
        whole_inputs = [self._whole_input(position) for position in self._inputs]
        values = _SplitCall.apply(self, *whole_inputs, *self._aliases.originals)  # type: ignore[no-untyped-call]
        self._handed_out = [weakref.ref(value) for value in values if value.requires_grad]
        assert self._template is not None
        leaves = list(self._template.leaves)
        for position, value in zip(self._eager, values, strict=True):
            leaves[position] = value
        for position, parts in self._plain.items():
            leaves[position] = self._plain_value(position, parts)
        return leaves

    def _plain_value(self, position: int, parts: list[Any]) -> Any:
        """A value without a gradient, of the values that parts gave."""
        assert self._template is not None
        effect, place, left = None, 0, None
        if position >= self._template.returned:
            effect, place = self._places[position - self._template.returned]
            left = self._verdict.left.get(effect.name) if self._verdict is not None else None
        if isinstance(parts[0], Chain):
            return Chain.of(parts, left.merges if left is not None else (), self._rows)
        merge = self._merge_of(position)
        if merge is not None:
            before = None
            if any(each.kind == "change" for each in (merge, *merge.others)) and effect is not None:
                before = [*flatten(effect.before)[0], *[None] * (place + 1)][place]
                if before is None:
                    raise UnsettledError
            return merge.value(before, parts, self._rows)
        if all(_is_same(part, parts[0]) for part in parts):
            return parts[0]
        raise UnsettledError

    def _merge_of(self, position: int) -> Merge | None:
        """Return how the judge found that an output or something left elsewhere is put together."""
        if self._verdict is None or self._template is None:
            return None
        if position < self._template.returned:
            return self._verdict.merges.get(position)
        effect, place = self._places[position - self._template.returned]
        left = self._verdict.left.get(effect.name)
        return left.merges[place] if left is not None and left.merges is not None else None

    def _leave(self, leaves: list[Any]) -> None:
        """Write what the forward leaves elsewhere, put together."""
        if self._snapshot is not None:
            self._snapshot.register()
        if not self._places:
            return
        assert self._template is not None
        values = self._template.left(leaves)
        for effect in {effect.name: effect for effect, _ in self._places}.values():
            effect.write(opened(values[effect.name]))

    def _whole_input(self, position: int) -> torch.Tensor:
        if position not in self._layout.split:
            whole: torch.Tensor = self._micro_batches[0].leaves[position]
            return whole
        return torch.cat([part.leaves[position] for part in self._micro_batches], self._layout.dim_of(position))

    def _lazy(self, position: int, joined: Joined) -> LazyTensor:
        lazy = LazyTensor(joined.whole_shape(), joined.dtype, joined.device, lambda: self._look(position))
        self._learnt.waiting.append(weakref.ref(lazy))
        return lazy

    def _look(self, position: int) -> torch.Tensor:
        """Compute an output the loop looks at after all, connected to the graph by replay."""
        self._learnt.reads_outputs = True
        if self._updates != self._learnt.updates:
            raise SessionError(
                "an output of a split batch was read after optimizer.step(), when its parameters were gone: "
                "read it before the step (from the next batch on memlab keeps it)"
            )
        if self._looked_at is None:
            again = self._again()
            now = self._random_now()
            with self._autocast.entered(), self._as_before():
                self._looked_at = again._leaves()
            now.restore()
        value: torch.Tensor = self._looked_at[position]
        return value

    def _again(self) -> MicroRun:
        """The same call once more, with a graph to its outputs."""
        return MicroRun(
            self._model, self._call, self._micro_batches, self._layout, self._weights, self._joins, self._learnt,
            random_states=self._random_states, verdict=self._verdict, per_part=self._per_part,
        )  # fmt: skip

    # -- first pass ----------------------------------------------------------------------------

    def first_pass(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run every micro-batch once.

        Returns:
            The joined outputs, and those among them that have no gradient.
        """
        with self._aliases.in_place():
            if self._verdict is not None:
                self._snapshot = Snapshot(self._model, self._verdict.changing, without_buffers_of=self._per_part)
            try:
                for index in range(len(self._micro_batches)):
                    self._first_run_of(index)
            except BaseException:
                if self._snapshot is not None:
                    self._snapshot.restore(strict=False)
                raise
        self._eager = [position for position, each in self._joined.items() if each.parts]
        joined = [self._joined[position] for position in self._eager]
        values = [one.value() for one in joined]
        self._check_settled()
        return values, [value for value, one in zip(values, joined, strict=True) if not one.differentiable]

    def _check_settled(self) -> None:
        for position in self._eager if self._verdict is not None and not self._repeats else ():
            merge = self._merge_of(position)
            if merge is not None and (merge.others or merge.kind == "same"):
                merge.value(None, self._joined[position].parts, self._rows)

    def start_over(self) -> None:
        """Random states as they were before the first run."""
        self._random_states[0].restore()

    def _random_now(self) -> Randomness:
        own = self._verdict.generators if self._verdict is not None else ()
        return Randomness(self._aliases.device, [*own, *filter(is_generator, self._micro_batches[0].leaves)])

    def _first_run_of(self, index: int) -> None:
        if not self._repeats:
            if index and self._verdict is not None and not self._verdict.goes_on:
                self._random_states[0].restore_host()
            self._random_states.append(self._random_now())
        else:
            self._random_states[index].restore()
        is_last = index == len(self._micro_batches) - 1
        keeps_graph = not self._repeats and (self._learnt.fused is not False or is_last)
        with torch.set_grad_enabled(keeps_graph or self._learnt.needs_graph):
            micro_batch, outputs = self._run(index)
        if not keeps_graph:
            outputs = outputs.without_graph()
        if index == 0:
            self._choose_form(outputs)
        if self._verdict is not None and ((index and outputs.spec != self._spec) or not self._verdict.knows(outputs)):
            raise UnsettledError
        self._spec = outputs.spec
        self._gather(outputs)
        if self._fused:
            loss = outputs.leaves[outputs.loss]
            # large outputs die before the backward pass, as in a loop that keeps only the loss
            self._template = outputs = outputs.without_tensors()
            self._backward_of_loss(micro_batch, loss, self._weights[outputs.loss][index])
        elif is_last and not self._repeats and not (self._verdict is not None and self._verdict.changing):
            self._kept = (micro_batch, outputs)
        if self._snapshot is not None:
            self._snapshot.restore()
        if not self._fused:
            self._template = outputs.without_tensors()
            # casts that were cached without gradients must not meet a pass that needs them
            torch.clear_autocast_cache()

    def _run(self, index: int, inputs: Mapping[int, torch.Tensor] | None = None) -> tuple[Call, Outputs]:
        leaves = list(self._micro_batches[index].leaves)
        for position in self._inputs:
            leaves[position] = leaves[position].detach().requires_grad_() if inputs is None else inputs[position]
        micro_batch = self._micro_batches[index].with_leaves(leaves)
        output = micro_batch.run(self._call)
        if self._snapshot is None:
            return micro_batch, Outputs.of(output)
        effects = self._snapshot.effects()
        is_first = index == 0 and not self._repeats and not self._places
        if is_first and self._verdict is not None and start_of(effects, self._layout.rows) not in self._verdict.starts:
            raise UnsettledError
        outputs = Outputs.of(output, {name: closed(effect) for name, effect in effects.items()})
        if not self._places:
            for effect in effects.values():
                count = len(flatten(closed(effect))[0])
                self._places += [(replace(effect, value=None), place) for place in range(count)]
        return micro_batch, outputs

    def _choose_form(self, outputs: Outputs) -> None:
        if not self._repeats:
            self._learnt.fused = (
                outputs.loss >= 0 and outputs.loss in self._weights and _requires_grad(outputs.leaves[outputs.loss])
            )
            self._fused = self._learnt.fused
        if self._fused and self._autocast.scales_gradients:
            self._inner_scale = self._learnt.loop_scale

    def _gather(self, outputs: Outputs) -> None:
        for position, leaf in enumerate(outputs.leaves):
            if self._is_plain(position, leaf, outputs):
                value = real(leaf).detach() if isinstance(leaf, torch.Tensor) else leaf
                self._plain.setdefault(position, []).append(value)
                continue
            if not isinstance(leaf, torch.Tensor):
                continue
            joined = self._joined.get(position) or self._new_joined(position, leaf, outputs)
            if joined.join is not None:
                joined.sizes.append(leaf.size(joined.join.dim))
            if not self._may_wait(joined, leaf):
                value = real(leaf)
                joined.differentiable |= value.requires_grad or (self._repeats and value.is_floating_point())
                joined.parts.append(value.detach())

    def _is_plain(self, position: int, leaf: Any, outputs: Outputs) -> bool:
        """Return whether a leaf is put together outside of the graph."""
        if self._verdict is None:
            return False
        merge = self._merge_of_leaf(position, outputs)
        if not isinstance(leaf, torch.Tensor):
            return True
        if position < outputs.returned:
            return merge is not None and not merge.has_graph and merge.kind in ("change", "sum", "largest", "smallest")
        return merge is None or not merge.has_graph

    def _merge_of_leaf(self, position: int, outputs: Outputs) -> Merge | None:
        self._template = self._template or outputs.without_tensors()
        return self._merge_of(position)

    def _new_joined(self, position: int, leaf: torch.Tensor, outputs: Outputs) -> Joined:
        merge = self._merge_of_leaf(position, outputs)
        if merge is not None:
            join = merge.join if merge.kind == "join" else None
            weights = merge.weights(self._rows)
        else:
            join, weights = self._known_join(position, outputs)
        joined = self._joined[position] = Joined(join, weights, self._rows, leaf.shape, leaf.dtype, leaf.device)
        return joined

    def _known_join(self, position: int, outputs: Outputs) -> tuple[Join | None, list[float] | None]:
        """Where an output is joined, or what that of each part weighs, by what the probe has found."""
        # of one row, an output for each row looks like a scalar
        is_scalar = position in outputs.scalars and not (
            position < len(self._joins) and self._joins[position] is not None
        )
        weights = self._weights.get(position) if is_scalar else None
        if is_scalar and weights is None:
            weights = [1 / len(self._micro_batches)] * len(self._micro_batches)
        return None if is_scalar else self._joins[position], weights

    def _may_wait(self, joined: Joined, leaf: torch.Tensor) -> bool:
        """Return whether an output is left out until somebody looks at it: a large one, or one not computed anyway."""
        if not self._fused or joined.join is None or self._learnt.reads_outputs:
            return False
        size_bytes = leaf.numel() * leaf.element_size() * len(self._micro_batches)
        return isinstance(leaf, LazyTensor) or size_bytes > LAZY_FROM_BYTES

    def _backward_of_loss(self, micro_batch: Call, loss: torch.Tensor, weight: float) -> None:
        if weight:  # without a target the mean of this micro-batch is 0/0
            self._backward([loss], [torch.full_like(loss, weight) * self._inner_scale])
        self._input_gradients.append(_gradients_of(micro_batch, self._inputs))

    def _backward(self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        with self._aliases.originals_untouched(type(self._model).__name__), without_autocast():
            torch.autograd.backward(tensors, gradients)

    # -- backward ------------------------------------------------------------------------------

    def gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the whole inputs and of the parameters, from those of the joined outputs."""
        wanted = {position: g for position, g in zip(self._eager, outer, strict=True) if g is not None}
        alive = [tensor for ref in self._handed_out if (tensor := ref()) is not None]
        if len(self._handed_out) > 1 and any(tensor.retains_grad for tensor in alive):
            raise RefusalError(
                _FIELD,
                f"the loop asks for the gradient of an output of {type(self._model).__name__} (retain_grad)",
                KEEP_WHOLE,
            )
        if self._fused:
            assert self._template is not None
            self._scale_gathered(wanted.pop(self._template.loss, None))
        if wanted:
            self._replay(wanted)
        inputs = [self._input_gradient(position) for position in self._inputs]
        self._input_gradients, self._kept, self.is_done = [], None, self._fused
        for joined in self._joined.values():
            joined.parts.clear()
        return (*inputs, *self._aliases.take_gradients())

    def _scale_gathered(self, loss_gradient: torch.Tensor | None) -> None:
        if loss_gradient is None:
            self._input_gradients = []
            self._aliases.take_gradients()
            return
        if self._autocast.scales_gradients:
            self._learnt.loop_scale = loss_gradient.detach()
        factor = loss_gradient / self._inner_scale
        if factor.device.type == "cpu" and float(factor) == 1.0:
            return
        gathered = [alias.grad for alias in self._aliases.aliases if alias.grad is not None]
        gathered += [gradient for part in self._input_gradients for gradient in part.values()]
        for gradient in gathered:
            # gradients of parameters that rest on the host are there
            gradient.mul_(factor.reshape(()).to(gradient.device, gradient.dtype))

    def differentiable_gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients that can be differentiated again: every micro-batch runs once more, on the parameters themselves.

        What was gathered stays for the backward pass that follows.
        """
        wanted = {position: g for position, g in zip(self._eager, outer, strict=True) if g is not None}
        self._check_replay(wanted)
        whole = {position: self._whole_input(position) for position in self._inputs}
        now, pairs = self._random_now(), []
        with self._aliases.originals_in_place(), self._autocast.entered(), self._as_before():
            for index in range(len(self._micro_batches)):
                self._random_states[index].restore()
                _, outputs = self._run(index, {position: self._part_of(whole, position, index) for position in whole})
                pairs += self._shares(outputs, wanted, index)
                if self._snapshot is not None:
                    self._snapshot.restore(strict=False)
        now.restore()
        return torch.autograd.grad(
            [tensor for tensor, _ in pairs], [*whole.values(), *self._aliases.originals], [share for _, share in pairs],
            create_graph=True, allow_unused=True,
        )  # fmt: skip

    def _part_of(self, whole: Mapping[int, torch.Tensor], position: int, index: int) -> torch.Tensor:
        if position not in self._layout.split:
            return whole[position]
        dim = self._layout.dim_of(position)
        sizes = [part.leaves[position].size(dim) for part in self._micro_batches]
        return whole[position].narrow(dim, sum(sizes[:index]), sizes[index])

    def _shares(
        self, outputs: Outputs, wanted: Mapping[int, torch.Tensor], index: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Outputs of one micro-batch, each with its part of the gradient that the loop sends."""
        pairs = []
        for position, gradient in wanted.items():
            leaf = real(outputs.leaves[position])
            share = self._joined[position].share(gradient, index, leaf.shape)
            if share is not None and leaf.requires_grad:
                pairs.append((leaf, share.reshape(leaf.shape)))
        return pairs

    def _replay(self, wanted: Mapping[int, torch.Tensor]) -> None:
        self._check_replay(wanted)
        now = self._random_now()
        order = [*range(len(self._micro_batches))]
        if self._kept is not None:
            order.insert(0, order.pop())  # its graph is there: use it first, so that it is freed first
        earlier = self._input_gradients
        replayed: dict[int, dict[int, torch.Tensor]] = {}
        with self._aliases.in_place(), self._autocast.entered(), self._as_before(), torch.enable_grad():
            for index in order:
                replayed[index] = self._replay_one(index, wanted)
                if self._snapshot is not None:
                    self._snapshot.restore(strict=False)
        now.restore()
        self._input_gradients = [_summed(replayed[i], earlier[i] if earlier else {}) for i in sorted(replayed)]

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restore what the forward reads beside its arguments, as it was before the call."""
        if self._snapshot is None:
            yield
            return
        statistics = Snapshot(self._model, complete=True) if self._per_part else None
        try:
            with self._snapshot.as_before():
                yield
        finally:
            if statistics is not None:
                statistics.restore(strict=False)

    def _replay_one(self, index: int, wanted: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self._kept is not None and index == len(self._micro_batches) - 1:
            (micro_batch, outputs), self._kept = self._kept, None
        else:
            self._random_states[index].restore()
            micro_batch, outputs = self._run(index)
        pairs = self._shares(outputs, wanted, index)
        del outputs
        if pairs:
            self._backward([tensor for tensor, _ in pairs], [share for _, share in pairs])
        return _gradients_of(micro_batch, self._inputs)

    def _check_replay(self, wanted: Mapping[int, torch.Tensor]) -> None:
        if any(
            self._joined[position].weights is not None
            and position not in self._weights
            and (self._verdict is None or position not in self._verdict.merges)
            for position in wanted
            if self._template is not None and position < self._template.returned
        ):
            raise RefusalError(
                _FIELD,
                f"the loop trains on a scalar of {type(self._model).__name__} that is no mean or sum over rows or targets",
                KEEP_WHOLE,
            )
        if self._updates != self._learnt.updates and self._kept is None:
            raise SessionError(
                "backward() through the outputs of a split batch came after optimizer.step(): call it before the step"
            )

    def _input_gradient(self, position: int) -> torch.Tensor | None:
        parts = [part[position] for part in self._input_gradients if position in part]
        if not parts:
            return None
        if position in self._layout.split:
            return torch.cat(parts, self._layout.dim_of(position))
        return torch.stack(parts).sum(0)


class _SplitCall(torch.autograd.Function):
    """The outer graph's view of a split call: whole inputs and parameters in, joined outputs out."""

    @staticmethod
    def forward(ctx: Any, run: MicroRun, *_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, constants = run.first_pass()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        # autograd lets go of what is saved when a backward pass is over, unless it is told to retain the graph
        holder: Any = torch.empty(0)
        # the loop's own hooks on saved tensors would give back another one
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # not in older torch
        is_hooked = top(True) is not None
        ctx.run = run if is_hooked else None
        holder.run = run
        ctx.save_for_backward(holder)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (holder,) = ctx.saved_tensors  # torch's own error where the graph is gone
        run = ctx.run or holder.run
        if run.is_done:
            raise SessionError(
                "backward() a second time through the loss of a split batch: its gradients were handed over at the first; "
                "let the loop compute the loss from the outputs, or use --checkpoint"
            )
        is_differentiated = torch.is_grad_enabled()  # as autograd has it under create_graph
        with uninterrupted():
            return (None, *(run.differentiable_gradients if is_differentiated else run.gradients)(gradients))


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and bool(real(leaf).requires_grad)


def _gradients_of(micro_batch: Call, positions: Sequence[int]) -> dict[int, torch.Tensor]:
    return {i: micro_batch.leaves[i].grad for i in positions if micro_batch.leaves[i].grad is not None}


def _summed(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {i: one[i] + other[i] if i in one and i in other else one.get(i, other.get(i)) for i in {*one, *other}}  # type: ignore[misc]
