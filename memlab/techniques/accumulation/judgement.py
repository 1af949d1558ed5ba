"""`Judgement`: rows of a batch run together and apart once, as the rules of `judge` say."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from memlab.errors import MemlabError
from memlab.runtime import graphs
from memlab.runtime.aliases import Aliases
from memlab.runtime.autocast import CallContext, without_autocast
from memlab.runtime.containers import Effect
from memlab.runtime.lazy import LazyTensor, real, requires_grad
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.modules import parameters_made
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.rng import Randomness, is_generator
from memlab.runtime.stand_ins import have_others
from memlab.runtime.surroundings import Surroundings
from memlab.runtime.tree import flatten, own_attributes
from memlab.techniques.accumulation.agreement import Agreement, refuse
from memlab.techniques.accumulation.batchnorm import in_groups
from memlab.techniques.accumulation.escapes import earlier_graph, escaped
from memlab.techniques.accumulation.merge import Merge, agree, closed
from memlab.techniques.accumulation.noise import Noise, Order
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.rounding import STRONG, Rounding
from memlab.techniques.accumulation.split import Call, Layout, Outputs
from memlab.techniques.accumulation.verdict import Left, SplitVerdict, making, start_of

TOLERANCE = 2e-5
LOW_TOLERANCE = 5e-2
_LOSS_SCALE = 2.0**12


class SumsError(Exception):
    """Scalars that are sums of those of the parts were derived as means."""


@dataclass
class _Run:
    """Results of a run, without its graph."""

    outputs: Outputs
    effects: dict[str, Effect]
    inputs: Sequence[torch.Tensor | None] = ()

    def without_graph(self, inputs: Sequence[torch.Tensor | None] = ()) -> _Run:
        """The same values; what had a graph can still be told by `requires_grad`."""
        outputs = replace(self.outputs, leaves=tuple(map(_detached, self.outputs.leaves)))
        left = outputs.left(outputs.leaves)
        effects = {name: replace(effect, value=left[name]) for name, effect in self.effects.items()}
        return _Run(outputs, effects, inputs)


class Judgement:
    """One comparison of rows together and apart.

    Over 300 lines: each look at a run comes at its place between two others, from one state that is put back.
    """

    def __init__(
        self,
        model: nn.Module,  # the model; as it was after `put_back`
        name: str,  # what errors call it
        probe: Probe,  # knows how losses add up
        per_part: tuple[type[nn.Module], ...],  # kinds of modules that take their statistics from each part
        is_low: bool,  # whether the plan computes in half precision
        call: Callable[..., Any],  # the model call below accumulation
        whole: Call,  # arguments of the rows together
        layout: Layout,  # along which dimensions they are cut
        ranges: list[tuple[int, int]],  # first row of each part, and the row after its last
    ) -> None:
        self._model, self._name, self._call, self._whole = model, name, call, whole
        self._layout, self._ranges, self._probe, self._per_part = layout, ranges, probe, per_part
        self._aliases = Aliases(model)
        self._device = self._aliases.device
        self.noise = Noise()  # random numbers of the runs
        self.draws_on_host = False  # whether the model draws numbers of Python or NumPy
        self._sums: set[int] = set()
        self._beside = _LeavesBeside()
        with self._aliases.in_place():
            self._snapshot = Surroundings(model, complete=True, without_buffers_of=per_part)
            self._start = Surroundings(model, complete=True)
        self._random = Randomness([*self._start.generators, *filter(is_generator, whole.leaves)])
        self._names = {id(p): n for n, p in model.named_parameters()}
        self._context = CallContext()
        self._versions = [p._version for p in self._aliases.originals]
        self._scale = _LOSS_SCALE if self._context.scales_gradients else 1.0
        self._rows = [stop - start for start, stop in ranges]
        is_low = is_low or self._context.is_on
        tolerance = LOW_TOLERANCE if is_low else TOLERANCE
        self._agreement = Agreement(name, self._rows, probe.joins(whole), tolerance)

    def put_back(self) -> None:
        """Put everything back as it was."""
        with self._aliases.in_place():
            self._start.begin_again()
        self._random.restore()
        self._aliases.take_gradients()
        self._beside.put_back()
        # casts of stand-ins for the weights
        torch.clear_autocast_cache()

    def look(self, rows: Call) -> None:
        """Run some rows with a graph, which is dropped."""
        with self._aliases.in_place(), torch.enable_grad(), self._start.writing():
            rows.run(self._call)

    # -- together and apart --------------------------------------------------------------------

    def verdict(self, *, order: Order, goes_on: bool) -> SplitVerdict:
        """Run rows together and apart, and compare.

        Args:
            order: in which random numbers follow the rows.
            goes_on: draw numbers of Python and NumPy likewise.

        Raises:
            DisagreementError: they give something else.
            SumsError: scalars were derived as means and are sums; the next try knows.
        """
        parts = [self._layout.take(self._whole, start, stop) for start, stop in self._ranges]
        weights = self._probe.weights(self._whole, self._layout, parts)
        with self._aliases.in_place(), torch.enable_grad():
            began = graphs.sequence_nr()
            with in_groups(self._model, self._per_part, self._rows):
                whole, inputs = self._run(self._whole, is_whole=True)
            if reason := earlier_graph(self._name, whole.outputs.leaves, began, self._snapshot):
                refuse(reason)
            if any(alias.grad is not None for alias in self._aliases.aliases):
                refuse(f"{self._name} runs a backward pass in its forward, and would once for each micro-batch")
            directions = self._directions(whole.outputs, weights)
            leading = _leading(whole.outputs.leaves)
            self._backward(whole.outputs, directions)
            self._check_backward(whole, inputs)
            if self.noise.computes_low:
                self._agreement.tolerance = LOW_TOLERANCE
            whole_inputs = [leaf.grad for leaf in inputs]
            sizes = self._norms()
            largest = list(sizes)
            self._negate_gradients()
            kept = whole.without_graph()
            returned = [
                weakref.ref(leaf) for leaf in whole.outputs.leaves if type(leaf) is torch.Tensor and leaf.grad_fn
            ]
            del whole
            self._snapshot.restore()
            self._check_left_alone()
            self._check_escapes(kept, returned)
            self._reset_statistics()
            ran: list[_Run] = []
            total = self._layout.rows_in(self._whole)
            for place, (start, stop) in enumerate(self._ranges):
                self._random.restore(host=not (goes_on and place))
                self.noise.give(start, stop, of=total, order=order)
                run, inputs = self._run(parts[place], is_whole=False)
                shares = self._shares(run.outputs, kept.outputs, directions, weights, place, ran)
                self._backward(run.outputs, shares)
                ran.append(run.without_graph([leaf.grad for leaf in inputs]))
                del run
                self._snapshot.restore()
                largest = [max(one, other) for one, other in zip(largest, self._norms(), strict=True)]
            residuals = self._norms()
            needs_graph = kept.outputs.loss not in directions and self._needs_graph(parts[0], ran[0], order=order)
        rounded = cache(lambda: self._rounded(directions, total, 1, order=order))
        merges = self._agreement.outputs(kept.outputs, [run.outputs for run in ran], weights, lambda: rounded()[0])
        left = self._agreement.left(kept.effects, [run.effects for run in ran])
        self._check_sums(kept.outputs, merges, left)
        strong = partial(self._rounded, directions, total, STRONG, order=order)
        self._agreement.gradients(residuals, largest, lambda: rounded()[1], lambda: strong()[1], self._name_of)
        self._agreement.inputs(whole_inputs, [run.inputs for run in ran])
        changing = frozenset(name for name, effect in kept.effects.items() if effect.kind == "written")
        starts = frozenset({start_of(kept.effects, self._layout.rows)})
        goes_on = goes_on or not self.draws_on_host
        draws = self.noise.any_drawn or self.noise.draws_inside
        return SplitVerdict(
            merges, left, changing, total, tuple(self._start.generators), starts, goes_on, needs_graph, leading,
            self.noise.chooses, draws, order,
        )  # fmt: skip

    def values(self, *, order: Order, goes_on: bool) -> SplitVerdict:
        """Run rows together and apart without gradients, and compare what they return and leave: there may be memory for that alone.

        Args:
            order: as for `verdict`.
            goes_on: likewise.

        Raises:
            DisagreementError: they give something else.
        """
        parts = [self._layout.take(self._whole, start, stop) for start, stop in self._ranges]
        weights = self._probe.weights(self._whole, self._layout, parts)
        total = self._layout.rows_in(self._whole)
        ran: list[_Run] = []
        with self._aliases.in_place(), torch.no_grad():
            with in_groups(self._model, self._per_part, self._rows):
                kept = self._run(self._whole, is_whole=True)[0].without_graph()
            self._snapshot.restore()
            self._reset_statistics()
            for place, (start, stop) in enumerate(self._ranges):
                self._random.restore(host=not (goes_on and place))
                self.noise.give(start, stop, of=total, order=order)
                ran.append(self._run(parts[place], is_whole=False)[0].without_graph())
                self._snapshot.restore()
        if self.noise.computes_low:
            self._agreement.tolerance = LOW_TOLERANCE
        for run in ran:
            self._agreement.structure(run.outputs, kept.outputs)
        rounded = cache(lambda: self._rounded({}, total, 1, order=order)[0])
        merges = self._agreement.outputs(kept.outputs, [run.outputs for run in ran], weights, rounded)
        left = self._agreement.left(kept.effects, [run.effects for run in ran])
        draws = self.noise.any_drawn or self.noise.draws_inside or self.draws_on_host
        return SplitVerdict(
            merges, left, frozenset(), total, goes_on=goes_on, chooses=self.noise.chooses, draws=draws, order=order
        )

    def _needs_graph(self, part: Call, ran: _Run, *, order: Order) -> bool:
        """Return whether the first part gives something else, or nothing, without gradients."""
        self._random.restore()
        self.noise.give(*self._ranges[0], of=self._layout.rows_in(self._whole), order=order)
        try:
            with torch.no_grad():
                outputs = self._run(part, is_whole=False)[0].outputs
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, MemlabError):
                raise
            return True
        finally:
            self._snapshot.restore()
        pairs = zip(outputs.leaves, ran.outputs.leaves, strict=False)
        return outputs.spec != ran.outputs.spec or not all(
            agree(real(a), real(b), self._agreement.tolerance) for a, b in pairs
        )

    def _run(self, call: Call, *, is_whole: bool) -> tuple[_Run, list[torch.Tensor]]:
        leaves = list(call.leaves)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[position] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        args, kwargs = call.spec.put(leaves)
        with self._start.writing(), self.noise, parameters_made(self._model) as made:
            output = self._call(*args, **kwargs)
        if made:
            refuse(making(self._name, made))
        self.draws_on_host |= is_whole and self._random.host_differs()
        if is_whole:
            after, spec = flatten((args, kwargs)) if not self._layout.in_lists else (leaves, call.spec)
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf._version != versions[position]:
                    refuse(f"{self._name} writes to its argument{call.spec.names()[position]} in place")
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad != call.leaves[position].requires_grad:
                    refuse(
                        f"{self._name} has its argument{call.spec.names()[position]} require gradients: a split batch gives it none"
                    )
            if spec != call.spec or not all(map(_unchanged, after, leaves)) or any(map(own_attributes, leaves)):
                refuse(f"{self._name} changes what is in its arguments")
            for name in (name for leaf in flatten(output)[0] for name in own_attributes(leaf)):
                refuse(f"{self._name} returns a tensor that something hangs on (.{name})")
        effects = self._snapshot.effects()
        effects = {name: replace(effect, value=closed(effect)) for name, effect in effects.items()}
        outputs = Outputs.of(output, {name: effect.value for name, effect in effects.items()})
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return _Run(outputs, effects), inputs

    def _directions(self, outputs: Outputs, weights: Mapping[int, list[float]]) -> dict[int, torch.Tensor]:
        """Return by what the run together is derived: its loss, and a random combination of what else has a graph.

        What the loss is computed from needs no direction of its own. What it is not (features beside a learnt scale) does, unless
        it is computed only if the loop looks at it.
        """
        graph = {i: real(leaf) for i, leaf in enumerate(outputs.leaves) if isinstance(leaf, torch.Tensor)}
        graph = {i: leaf for i, leaf in graph.items() if leaf.requires_grad and not leaf.is_meta}
        found: dict[int, torch.Tensor] = {}
        if outputs.loss in graph and outputs.loss in weights:
            found[outputs.loss] = torch.ones_like(graph[outputs.loss])
            graph = {i: leaf for i, leaf in graph.items() if not isinstance(outputs.leaves[i], LazyTensor)}
        before_loss = graphs.before(_edges(graph)).get(outputs.loss, ()) if found else ()
        for i, leaf in graph.items():
            if i in found or i in before_loss:
                continue
            generator = torch.Generator(leaf.device).manual_seed(i)
            drawn = torch.randn(leaf.shape, generator=generator, device=leaf.device, dtype=torch.float32).to(leaf.dtype)
            found[i] = drawn / max(1, leaf.numel()) ** 0.5
        return found

    def _shares(
        self,
        part: Outputs,
        whole: Outputs,
        directions: Mapping[int, torch.Tensor],
        weights: Mapping[int, list[float]],
        place: int,
        before: Sequence[_Run],
    ) -> dict[int, torch.Tensor]:
        """The same for one part."""
        self._agreement.structure(part, whole)
        shares: dict[int, torch.Tensor] = {}
        for i, direction in directions.items():
            leaf, target = part.leaves[i], whole.leaves[i]
            if i in weights:
                if weights[i][place]:
                    shares[i] = direction * weights[i][place]
            elif leaf.shape == direction.shape:
                # what all rows share is its own mean
                shares[i] = direction * (1.0 if i in self._sums else self._rows[place] / sum(self._rows))
            else:
                join = self._agreement.join_of(i, leaf, target)
                sizes = [each.leaves[i].size(join.dim) for each in (*(run.outputs for run in before), part)]
                shares[i] = join.share(direction, place, sizes, self._rows, leaf.shape)
        return shares

    def _check_sums(self, outputs: Outputs, merges: Mapping[int, Merge], left: Mapping[str, Left]) -> None:
        """Check that scalars were derived as they turned out to be put together; values are known when all parts have run."""
        of_left = [merge for name in outputs.left(outputs.leaves) for merge in left[name].merges or ()]
        by_position = {**merges, **dict(enumerate(of_left, outputs.returned))}
        sums = {i for i, merge in by_position.items() if merge.has_graph and merge.kind == "sum"}
        if not sums <= self._sums:
            self._sums |= sums
            raise SumsError

    def _backward(self, outputs: Outputs, directions: Mapping[int, torch.Tensor]) -> None:
        pairs = [(real(outputs.leaves[i]), direction * self._scale) for i, direction in directions.items()]
        pairs = [(tensor, direction) for tensor, direction in pairs if tensor.requires_grad]
        if pairs:
            # parts that are recomputed see the numbers of their first run
            self.noise.repeat()
            tensors = [tensor for tensor, _ in pairs]
            own = {id(each) for each in self._aliases.aliases}
            self._beside.set_aside((leaf for leaf in graphs.leaves_of(tensors) if id(leaf) not in own), self._name)
            with self._aliases.originals_untouched(type(self._model).__name__), without_autocast(), self.noise:
                torch.autograd.backward(tensors, [direction for _, direction in pairs])

    def _negate_gradients(self) -> None:
        """Negate what has gathered, so that the next gradients are compared with it: a backward pass need not be linear."""
        for alias in self._aliases.aliases:
            if alias.grad is not None:
                alias.grad.neg_()

    def _norms(self) -> list[float]:
        found = [alias.grad for alias in self._aliases.aliases]
        norms = [
            torch.zeros((), device="cpu")
            if grad is None
            else torch.linalg.vector_norm(
                grad.detach() if grad.layout is torch.strided else grad.to_dense(),
                dtype=torch.promote_types(grad.dtype, torch.float32),
            )
            for grad in found
        ]
        return torch.stack([norm.to(self._device, torch.float32) for norm in norms]).tolist() if norms else []

    def _reset_statistics(self) -> None:
        """Statistics that each part updates by itself, as they were before."""
        if self._per_part:
            self._start.restore()

    def _rounded(
        self, directions: Mapping[int, torch.Tensor], rows: int, times: int, *, order: Order
    ) -> tuple[Outputs, list[float]]:
        """Outputs of rows together with so strong noise on their products, and by how much their gradients differ."""
        self._aliases.take_gradients()
        for rounding in (nullcontext(), Rounding(self._device, times)):
            self._negate_gradients()
            self._random.restore()
            self.noise.give(0, rows, of=rows, order=order)
            with_graph = torch.set_grad_enabled(bool(directions))
            with self._aliases.in_place(), with_graph, in_groups(self._model, self._per_part, self._rows):
                with rounding:
                    run, _ = self._run(self._whole, is_whole=False)
                    self._backward(run.outputs, directions)
                outputs = run.without_graph().outputs
                del run
                self._snapshot.restore()
        return outputs, self._norms()

    def _name_of(self, number: int) -> str:
        return self._names.get(id(self._aliases.originals[number]), "a parameter")

    # -- what nothing can be told from ---------------------------------------------------------

    def _check_left_alone(self) -> None:
        for parameter, version in zip(self._aliases.originals, self._versions, strict=True):
            if parameter._version != version:
                refuse(f"the forward pass of {self._name} writes to its parameters")

    def _check_backward(self, whole: _Run, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse what keeps a gradient, or does something, in the backward pass: it would once for each part."""
        given = {id(each) for each in (*inputs, *self._aliases.aliases)}
        for i, leaf in enumerate(whole.outputs.leaves):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and leaf.retains_grad:
                refuse(f"{whole.outputs.name_of(i)} of {self._name} keeps its gradient (retain_grad)")
            if type(leaf) is torch.Tensor and leaf.requires_grad and leaf.is_leaf and id(leaf) not in given:
                refuse(
                    f"{whole.outputs.name_of(i)} of {self._name} is a leaf that its forward pass makes: a split batch gives it no gradient"
                )
        for name, effect in self._snapshot.effects().items():
            leaves, structure = flatten(closed(effect))
            known, known_structure = flatten(whole.effects[name].value) if name in whole.effects else ([], None)
            pairs = zip(leaves, known, strict=False)
            if structure != known_structure or not all(one is other or agree(one, other, 0.0) for one, other in pairs):
                refuse(f"the backward pass of {self._name} changes {name}, and would once for each micro-batch")

    def _check_escapes(self, kept: _Run, returned: Sequence[weakref.ref[torch.Tensor]]) -> None:
        """Refuse tensors with a graph that are kept where nobody looked."""
        known = [*kept.outputs.leaves, *self._whole.leaves, *self._model.parameters(), *self._model.buffers()]
        seen = {storage_of(leaf) for leaf in known if type(leaf) in (torch.Tensor, nn.Parameter)}
        torch.clear_autocast_cache()
        if any(leaf() is not None for leaf in returned):
            seen -= {storage_of(leaf) for leaf in kept.outputs.leaves if isinstance(leaf, torch.Tensor)}
        found = escaped(lambda: self.noise.survivors - seen)
        if found is not None:
            tensor, keeper = found
            refuse(f"a tensor {list(tensor.shape)} with a graph leaves {self._name} past its output, {keeper}")


class _LeavesBeside:
    """Leaves that are none of the model's weights (a table of the loop's), whose gradients the runs are not to add to."""

    def __init__(self) -> None:
        # with their gradients; one that the forward pass has made goes with its graph, or it would seem to be kept by the model
        self._kept: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = []

    def set_aside(self, leaves: Iterable[torch.Tensor], name: str) -> None:
        """Take gradients of leaves away, unless that is done. Refuses hooks on them, which would be called once for each part."""
        for leaf in leaves:
            if have_others((leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None))):
                refuse(
                    f"{name} uses a tensor of the loop's that has a hook, which would be called once for each micro-batch"
                )
            if not any(known() is leaf for known, _ in self._kept):
                self._kept.append((weakref.ref(leaf), leaf.grad))
                leaf.grad = None

    def put_back(self) -> None:
        """Give them back."""
        for known, gradient in self._kept:
            leaf = known()
            if leaf is not None:
                leaf.grad = gradient
        self._kept.clear()


def _unchanged(one: Any, other: Any) -> bool:
    """Return whether an argument is still what it was; packed rows are unpacked anew."""
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return one is other or (both and one.shape == other.shape and bool((one == other).all()))


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    value = real(leaf)
    return value.detach().requires_grad_() if value.requires_grad else value.detach()


def _leading(leaves: Sequence[Any]) -> frozenset[int]:
    """Positions of the outputs that others are computed from."""
    graph = {i: real(each) for i, each in enumerate(leaves) if requires_grad(each)}
    return frozenset(i for others in graphs.before(_edges(graph)).values() for i in others)


def _edges(graph: Mapping[int, torch.Tensor]) -> dict[int, Any]:
    return {i: torch.autograd.graph.get_gradient_edge(each) for i, each in graph.items()}
