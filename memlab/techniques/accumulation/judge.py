"""The first batch of each shape is the judge: its rows are run together and apart, and have to give the same.

Numbered rules:

1. Both runs are as in training: in train mode, with gradients, through all techniques below, with the same random numbers
   (`noise`). Nothing is left behind by either: buffers, attributes, whatever hooks keep, random states and gradients are put
   back (`surroundings`).
2. Held against each other are outputs, the gradient of the loss (without one: of a random combination of the outputs) by every
   parameter and input, and everything left elsewhere. How the latter is put together is found out here as well (`merge`).
3. A gradient may differ by `TOLERANCE` of its size, or of a partial sum's where parts cancel, or of a twentieth of that of the
   largest gradient; an output by that share of its largest value. In half precision by `LOW_TOLERANCE`. Where a gradient differs
   by more, the run together is repeated with products that are rounded otherwise (`rounding`), and may differ by some times as much
   as that changes it.
4. It is done with all rows, or if memory does not suffice with those of one micro-batch. Where that is one row, and two do not fit,
   there is no judgement.
"""

from __future__ import annotations

import gc
import inspect
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn

from memlab.errors import MemlabError, RefusalError
from memlab.runtime.aliases import Aliases
from memlab.runtime.autocast import AutocastState, without_autocast
from memlab.runtime.cuda_room import most_bytes
from memlab.runtime.lazy import real
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.rng import Randomness, is_generator
from memlab.runtime.surroundings import KEEP_WHOLE, Effect, Snapshot
from memlab.runtime.tree import flatten, runs_later
from memlab.techniques.accumulation.batchnorm import in_groups
from memlab.techniques.accumulation.merge import (
    Chain,
    Join,
    Merge,
    agree,
    close,
    closed,
    distance,
    equal,
    found_merge,
    why_apart,
)
from memlab.techniques.accumulation.noise import Noise, StrangeDrawError
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.rounding import TIMES, Rounding
from memlab.techniques.accumulation.split import Call, Layout, Outputs, row_ranges

_FIELD = "accumulation"
TOLERANCE = 2e-5
LOW_TOLERANCE = 5e-2
# a gradient smaller than this share of the largest one need not be known better than that one
_LEAST_SHARE = 5e-2
# share of the free memory that the run together may be expected to take
_SHARE_OF_FREE = 0.7
_LOSS_SCALE = 2.0**12
# share of a gradient's size that may be rounding
_MOST_ROUNDING = 0.2


@dataclass(frozen=True)
class Left:
    """Rule by which values that a forward leaves in one place are combined.

    Args:
        merges: one for each leaf; None where items of lists are put one after another.
    """

    merges: tuple[Merge, ...] | None


@dataclass(frozen=True)
class Verdict:
    """Result of a judgement.

    Args:
        merges: of outputs that are neither joined nor weighted, by position.
        left: what is left beside the output, by name.
        changing: names of tensors that are written in place.
        rows: rows that were run.
        generators: of random numbers, which the model refers to.
        starts: what was in the places before, see `start_of`.
        goes_on: whether numbers of Python and NumPy are drawn one after another, part by part; else each part draws the same.
        needs_graph: whether a call without gradients gives something else.
        draws: whether the model draws random numbers with torch.
    """

    merges: Mapping[int, Merge]
    left: Mapping[str, Left]
    changing: frozenset[str]
    rows: int
    generators: tuple[Any, ...] = ()
    starts: frozenset[Any] = frozenset()
    goes_on: bool = True
    needs_graph: bool = False
    draws: bool = False

    def knows(self, outputs: Outputs) -> bool:
        """Return whether a call has left something in the places where the judged one did, and in no other."""
        return {*outputs.spec.children[1].children_by_name()} == {*self.left}


def start_of(effects: Mapping[str, Effect], rows: int) -> frozenset[Any]:
    """Return the kinds of things that were in the places a forward writes to; a state of a batch's rows is another than none.

    Args:
        effects: what it wrote.
        rows: of its batch.
    """

    def kind(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return (type(value), *(size == rows for size in value.shape)) if is_tensor else type(value)

    return frozenset((name, kind(effect.before)) for name, effect in effects.items() if effect.kind == "set")


class _DisagreementError(Exception):
    def __init__(self, reason: str, instead: str = KEEP_WHOLE) -> None:
        super().__init__(reason)
        self.reason, self.instead = reason, instead


class _SumsError(Exception):
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


class Judge:
    """Judges splits of one model's calls.

    Args:
        model: the model.
        name: how errors call it.
        probe: knows how its losses add up.
        per_part: kinds of modules that are to take their statistics from each part.
        is_low: whether the plan computes in half precision.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        probe: Probe,
        per_part: tuple[type[nn.Module], ...] = (),
        *,
        is_low: bool = False,
    ) -> None:
        self._model = model
        self._name = name
        self._probe = probe
        self._per_part = per_part
        self._is_low = is_low or probe.is_low

    def judge(self, call: Callable[..., Any], whole: Call, layout: Layout, parts: int) -> Verdict | None:
        """Return whether this call may be split into so many parts.

        Args:
            call: the model call below accumulation.
            whole: its arguments.
            layout: how they split.
            parts: micro-batches.

        Returns:
            What was found out; None if not even two rows can be run together, but one may.

        Raises:
            RefusalError: rows apart give something else than rows together.
        """
        whole = layout.view(whole)
        rows = layout.rows
        micro_rows = -(-rows // parts)
        ranges = row_ranges(rows, parts)
        while True:
            shortage: BaseException | None = None
            try:
                if rows > 2 and not self._has_room_for(call, whole, layout, rows):
                    raise torch.OutOfMemoryError("rows together are expected to take more memory than is free")
                return self._judged(call, layout.take(whole, 0, rows), layout, ranges)
            except BaseException as error:
                # a technique below may have no room for so many rows in the budget it was given
                is_of_another = isinstance(error, RefusalError) and error.technique != _FIELD
                if not (is_out_of_memory(error) or is_of_another):
                    raise
                if rows <= max(2, micro_rows) and micro_rows > 1:
                    raise
                shortage = error
            release(shortage)
            gc.collect()
            if rows <= 2:
                return None
            rows = max(2, micro_rows)
            ranges = row_ranges(rows, 2)

    def _judged(self, call: Callable[..., Any], whole: Call, layout: Layout, ranges: list[tuple[int, int]]) -> Verdict:
        first: _DisagreementError | None = None
        draws_on_host = False
        for in_turn in (False, True):
            for goes_on in (self._probe.goes_on, not self._probe.goes_on):
                attempt = self._attempt(call, whole, layout, ranges)
                try:
                    return attempt.verdict(in_turn=in_turn, goes_on=goes_on)
                except _SumsError:
                    attempt.put_back()
                    return attempt.verdict(in_turn=in_turn, goes_on=goes_on)
                except StrangeDrawError:
                    first = first or _DisagreementError(
                        f"the random numbers that {self._name} draws do not follow the rows of its batch"
                    )
                    break
                except _DisagreementError as disagreement:
                    first = first or disagreement
                    draws_on_host = attempt.draws_on_host
                    if not draws_on_host:
                        break
                finally:
                    attempt.put_back()
            if not attempt.noise.any_drawn:
                break
        assert first is not None
        unless = (
            ", unless it is for the random numbers of Python or NumPy, which do not follow its rows"
            if draws_on_host
            else ""
        )
        raise RefusalError(_FIELD, first.reason + unless, first.instead)

    def _attempt(
        self, call: Callable[..., Any], whole: Call, layout: Layout, ranges: list[tuple[int, int]]
    ) -> _Attempt:
        model, name, probe = self._model, self._name, self._probe
        return _Attempt(model, name, call, whole, layout, ranges, probe, self._per_part, is_low=self._is_low)

    def _has_room_for(self, call: Callable[..., Any], whole: Call, layout: Layout, rows: int) -> bool:
        """Return whether so many rows are expected to fit, by what two of them keep for the backward pass."""
        device = next(self._model.parameters()).device
        free_bytes = _free_bytes(device)
        if free_bytes is None:
            return True
        kept: dict[int, int] = {}
        own = {p.untyped_storage()._cdata for p in self._model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return tensor.detach()  # an output that its own graph holds would never be freed

        if sum(leaf.nbytes for leaf in whole.leaves if isinstance(leaf, torch.Tensor)) * 1000 < free_bytes:
            small = sum(p.numel() for p in self._model.parameters()) * 1000 < free_bytes
            if small:  # nothing this small can need that much
                return True
        attempt = self._attempt(call, whole, layout, [])
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                attempt.look(layout.take(whole, 0, 2))
        finally:
            attempt.put_back()
        gradients = sum(p.numel() * p.element_size() for p in self._model.parameters() if p.requires_grad)
        return sum(kept.values()) / 2 * rows + 2 * gradients < _SHARE_OF_FREE * free_bytes


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return max(0, most_bytes(device) - torch.cuda.memory_allocated(device))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on this system
        return None


class _Attempt:
    """One comparison of rows together and apart."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        call: Callable[..., Any],
        whole: Call,
        layout: Layout,
        ranges: list[tuple[int, int]],
        probe: Probe,
        per_part: tuple[type[nn.Module], ...],
        *,
        is_low: bool,
    ) -> None:
        self._model, self._name, self._call, self._whole = model, name, call, whole
        self._layout, self._ranges, self._probe, self._per_part = layout, ranges, probe, per_part
        self._aliases = Aliases(model)
        self._device = self._aliases.device
        self.noise = Noise()
        self.draws_on_host = False
        self._sums: set[int] = set()
        with self._aliases.in_place():
            self._snapshot = Snapshot(model, complete=True, without_buffers_of=per_part)
            self._start = Snapshot(model, complete=True)
        self._random = Randomness(self._device, [*self._start.generators, *filter(is_generator, whole.leaves)])
        self._names = {id(p): n for n, p in model.named_parameters()}
        self._autocast = AutocastState()
        is_low = is_low or self._autocast.is_on
        self._tolerance = LOW_TOLERANCE if is_low else TOLERANCE
        self._versions = [p._version for p in self._aliases.originals]
        self._scale = _LOSS_SCALE if self._autocast.scales_gradients else 1.0
        self._rows = [stop - start for start, stop in ranges]

    def put_back(self) -> None:
        """Everything as it was."""
        with self._aliases.in_place():
            self._start.restore()
        self._random.restore()
        self._aliases.take_gradients()
        # casts of stand-ins for the weights
        torch.clear_autocast_cache()

    def look(self, rows: Call) -> None:
        """Run some rows with a graph, which is dropped."""
        with self._aliases.in_place(), torch.enable_grad():
            rows.run(self._call)

    # -- together and apart --------------------------------------------------------------------

    def verdict(self, *, in_turn: bool, goes_on: bool) -> Verdict:
        parts = [self._layout.take(self._whole, start, stop) for start, stop in self._ranges]
        weights = self._probe.weights(self._whole, self._layout, parts)
        with self._aliases.in_place(), torch.enable_grad():
            with in_groups(self._model, self._per_part, self._rows):
                whole, inputs = self._run(self._whole, is_whole=True)
            directions = self._directions(whole.outputs, weights)
            self._backward(whole.outputs, directions)
            self._check_backward(whole)
            if self.noise.computes_low:
                self._tolerance = LOW_TOLERANCE
            whole_inputs = [leaf.grad for leaf in inputs]
            sizes = self._norms()
            largest = list(sizes)
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
                self.noise.give(start, stop, of=total, in_turn=in_turn)
                run, inputs = self._run(parts[place], is_whole=False)
                shares = self._shares(run.outputs, kept.outputs, directions, weights, place, ran)
                self._backward(run.outputs, shares)
                ran.append(run.without_graph([leaf.grad for leaf in inputs]))
                del run
                self._snapshot.restore()
                largest = [max(one, other) for one, other in zip(largest, self._norms(), strict=True)]
            residuals = self._norms()
            needs_graph = kept.outputs.loss not in directions and self._needs_graph(parts[0], ran[0], in_turn=in_turn)
        rounded = cache(lambda: self._rounded(directions, total, in_turn=in_turn))
        merges = self._compare_outputs(kept.outputs, [run.outputs for run in ran], weights, rounded)
        left = self._compare_left(kept.effects, [run.effects for run in ran])
        self._check_sums(kept.outputs, merges, left)
        self._compare_gradients(residuals, largest, lambda: rounded()[1])
        self._compare_inputs(whole_inputs, [run.inputs for run in ran])
        changing = frozenset(name for name, effect in kept.effects.items() if effect.kind == "written")
        starts = frozenset({start_of(kept.effects, self._layout.rows)})
        goes_on = goes_on or not self.draws_on_host
        draws = self.noise.any_drawn or self.noise.draws_inside
        return Verdict(
            merges, left, changing, total, tuple(self._start.generators), starts, goes_on, needs_graph, draws
        )

    def _needs_graph(self, part: Call, ran: _Run, *, in_turn: bool) -> bool:
        """Return whether the first part gives something else, or nothing, without gradients."""
        self._random.restore()
        self.noise.give(*self._ranges[0], of=self._layout.rows_in(self._whole), in_turn=in_turn)
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
        return outputs.spec != ran.outputs.spec or not all(agree(real(a), real(b), self._tolerance) for a, b in pairs)

    def _run(self, call: Call, *, is_whole: bool) -> tuple[_Run, list[torch.Tensor]]:
        leaves = list(call.leaves)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[position] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
        args, kwargs = call.spec.put(leaves)
        with self.noise:
            output = self._call(*args, **kwargs)
        self.draws_on_host |= is_whole and self._random.host_differs()
        if is_whole:
            after, spec = flatten((args, kwargs)) if not self._layout.in_lists else (leaves, call.spec)
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor) and leaf._version != versions[position]:
                    self._refuse(f"{self._name} writes to its argument{call.spec.names()[position]} in place")
            if spec != call.spec or not all(map(_unchanged, after, leaves)):
                self._refuse(f"{self._name} changes what is in its arguments")
        effects = self._snapshot.effects()
        effects = {name: replace(effect, value=closed(effect)) for name, effect in effects.items()}
        outputs = Outputs.of(output, {name: effect.value for name, effect in effects.items()})
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return _Run(outputs, effects), inputs

    def _refuse(self, reason: str, instead: str = KEEP_WHOLE) -> NoReturn:
        raise _DisagreementError(reason, instead)

    def _directions(self, outputs: Outputs, weights: Mapping[int, list[float]]) -> dict[int, torch.Tensor]:
        """By what the run together is derived: its loss, or a random combination of what has a graph."""
        graph = {i: real(leaf) for i, leaf in enumerate(outputs.leaves) if isinstance(leaf, torch.Tensor)}
        graph = {i: leaf for i, leaf in graph.items() if leaf.requires_grad}
        if outputs.loss in graph and outputs.loss in weights:
            return {outputs.loss: torch.ones_like(graph[outputs.loss])}
        found: dict[int, torch.Tensor] = {}
        for i, leaf in graph.items():
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
        """The negative of the same for one part."""
        if part.spec != whole.spec:
            self._refuse_structure(part, whole)
        shares: dict[int, torch.Tensor] = {}
        for i, direction in directions.items():
            leaf, target = part.leaves[i], whole.leaves[i]
            if i in weights:
                if weights[i][place]:
                    shares[i] = -direction * weights[i][place]
            elif leaf.shape == direction.shape:
                # what all rows share is its own mean
                shares[i] = -direction * (1.0 if i in self._sums else self._rows[place] / sum(self._rows))
            else:
                join = self._join_of(i, leaf, target)
                sizes = [each.leaves[i].size(join.dim) for each in (*(run.outputs for run in before), part)]
                shares[i] = -join.share(direction, place, sizes, self._rows, leaf.shape)
        return shares

    def _check_sums(self, outputs: Outputs, merges: Mapping[int, Merge], left: Mapping[str, Left]) -> None:
        """Check that scalars were derived as they turned out to be put together; values are known when all parts have run."""
        of_left = [merge for name in outputs.left(outputs.leaves) for merge in left[name].merges or ()]
        by_position = {**merges, **dict(enumerate(of_left, outputs.returned))}
        sums = {i for i, merge in by_position.items() if merge.has_graph and merge.kind == "sum"}
        if not sums <= self._sums:
            self._sums |= sums
            raise _SumsError

    def _join_of(self, position: int, part: torch.Tensor, whole: torch.Tensor) -> Join:
        joins = self._probe.joins(self._whole)
        known = joins[position] if position < len(joins) else None
        if known is not None:
            return known
        rows, total = self._rows[0], sum(self._rows)
        fitting = [d for d in range(whole.dim()) if whole.size(d) != part.size(d) and part.dim() == whole.dim()]
        fitting = [d for d in fitting if part.size(d) * total == whole.size(d) * rows] or fitting
        if not fitting:
            self._refuse(
                *why_apart(f"output {position}", self._name, whole, [part], self._rows[:1], Join(0), self._tolerance)
            )
        return Join(fitting[0])

    def _backward(self, outputs: Outputs, directions: Mapping[int, torch.Tensor]) -> None:
        pairs = [(real(outputs.leaves[i]), direction * self._scale) for i, direction in directions.items()]
        pairs = [(tensor, direction) for tensor, direction in pairs if tensor.requires_grad]
        if pairs:
            # parts that are recomputed see the numbers of their first run
            self.noise.repeat()
            with self._aliases.originals_untouched(type(self._model).__name__), without_autocast(), self.noise:
                torch.autograd.backward([tensor for tensor, _ in pairs], [direction for _, direction in pairs])

    def _norms(self) -> list[float]:
        found = [alias.grad for alias in self._aliases.aliases]
        norms = [
            torch.zeros(())
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

    # -- what must agree -----------------------------------------------------------------------

    def _refuse_structure(self, part: Outputs, whole: Outputs) -> NoReturn:
        names = {*map(whole.name_of, range(len(whole.leaves)))} ^ {*map(part.name_of, range(len(part.leaves)))}
        what = ", ".join(sorted(names)[:3]) or "its type"
        self._refuse(
            f"what {self._name} returns or leaves behind has another structure for some rows than for all ({what})"
        )

    def _compare_outputs(
        self,
        whole: Outputs,
        parts: Sequence[Outputs],
        weights: Mapping[int, list[float]],
        rounded: Callable[[], tuple[Outputs, Sequence[float]]],
    ) -> dict[int, Merge]:
        merges: dict[int, Merge] = {}
        joins = self._probe.joins(self._whole)
        for i in range(whole.returned):
            leaf, pieces = whole.leaves[i], [part.leaves[i] for part in parts]
            if i in weights:
                together = sum(piece * share for piece, share in zip(pieces, weights[i], strict=True) if share)
                apart = _number(together) - _number(leaf)
                size = max(abs(_number(p)) for p, s in zip([leaf, *pieces], [1.0, *weights[i]], strict=True) if s)
                if (
                    not abs(apart) <= self._tolerance * size
                    and _number(leaf) == _number(leaf)
                    and not abs(apart) <= TIMES * abs(_number(rounded()[0].leaves[i]) - _number(leaf))
                ):
                    self._refuse_loss(whole, i, abs(apart) / size)
                continue
            known = joins[i] if i < len(joins) else None
            if (
                known is not None
                and isinstance(leaf, torch.Tensor)
                and close(Merge("join", known).value(None, pieces, self._rows), leaf, self._tolerance)
            ):
                continue
            merge = found_merge(None, pieces, leaf, self._rows, self._tolerance)
            if merge is None:
                self._refuse_output(whole, i, pieces)
            merges[i] = merge
        return merges

    def _refuse_loss(self, whole: Outputs, position: int, share: float) -> NoReturn:
        what = "the loss" if position == whole.loss else whole.name_of(position)
        self._refuse(
            f"{what} of {self._name} is not a mean or sum over rows or targets, so micro-batches cannot give its gradient: "
            f"together they are {share:.2g} off (allowed {self._tolerance:.0e})",
            "let the loop compute the loss from the outputs (any loss works then), or use --checkpoint",
        )

    def _refuse_output(self, whole: Outputs, position: int, pieces: Sequence[Any]) -> NoReturn:
        leaf, name = whole.leaves[position], whole.name_of(position)
        if runs_later(leaf):
            self._refuse(f"{name} of {self._name} is a {type(leaf).__name__}, which computes when the loop uses it")
        if not isinstance(leaf, torch.Tensor):
            self._refuse(
                f"{name} of {self._name} is {leaf!r} for the whole batch and {pieces[0]!r} for its first micro-batch"
            )
        if position in whole.scalars:
            self._refuse_loss(whole, position, self._off(pieces, leaf, Merge("mean")))
        joins = self._probe.joins(self._whole)
        known = joins[position] if position < len(joins) else None
        self._refuse(*why_apart(name, self._name, leaf, pieces, self._rows, known or Join(0), self._tolerance))

    def _off(self, pieces: Sequence[Any], leaf: torch.Tensor, merge: Merge) -> float:
        try:
            value = merge.value(None, [real(piece).detach() for piece in pieces], self._rows)
            return distance(value, leaf)
        except (RuntimeError, IndexError):
            return float("inf")

    def _compare_left(self, whole: Mapping[str, Effect], parts: Sequence[Mapping[str, Effect]]) -> dict[str, Left]:
        left: dict[str, Left] = {}
        for name in {**whole, **{name: None for part in parts for name in part}}:
            present = [part.get(name) for part in parts]
            effect = whole.get(name)
            if effect is None or any(each is None for each in present):
                self._refuse(f"{self._name} changes {name} for some rows of a batch and not for others")
            left[name] = self._left(name, effect, [each for each in present if each is not None])
        return left

    def _left(self, name: str, whole: Effect, parts: Sequence[Effect]) -> Left:
        values = [part.value for part in parts]
        if isinstance(whole.value, Chain) and all(isinstance(value, Chain) for value in values):
            if all(len(value.items) == len(whole.value.items) for value in values):
                merges = self._merges(name, None, [[*value.items] for value in values], [*whole.value.items])
                return Left(merges)
            if equal(Chain.of(values, None, self._rows), whole.value):
                return Left(None)
        leaves, structure = flatten(whole.value)
        flat = [flatten(value) for value in values]
        if any(spec != structure for _, spec in flat) or any(part.kind != whole.kind for part in parts):
            self._refuse(
                f"{name} of {self._name} holds another number of things after a split batch than after a whole one"
            )
        before, before_structure = flatten(whole.before)
        known = before if before_structure == structure and whole.kind != "appended" else None
        return Left(self._merges(name, known, [leaves for leaves, _ in flat], leaves))

    def _merges(
        self, name: str, before: Sequence[Any] | None, parts: Sequence[Sequence[Any]], whole: Sequence[Any]
    ) -> tuple[Merge, ...]:
        merges = []
        for i, leaf in enumerate(whole):
            pieces = [leaves[i] for leaves in parts]
            merge = found_merge(before[i] if before else None, pieces, leaf, self._rows, self._tolerance)
            if merge is None:
                how = ""
                if isinstance(leaf, torch.Tensor) and all(piece.shape == leaf.shape for piece in pieces):
                    how = f", {self._off(pieces, leaf, Merge('mean')):.2g} of its size away (allowed {self._tolerance:.0e})"
                self._refuse(
                    f"{name} of {self._name} cannot be put together from micro-batches: a whole batch leaves another value{how}"
                )
            merges.append(merge)
        return tuple(merges)

    def _rounded(
        self, directions: Mapping[int, torch.Tensor], rows: int, *, in_turn: bool
    ) -> tuple[Outputs, list[float]]:
        """Outputs of rows together whose products are rounded otherwise, and by how much their gradients differ."""
        self._aliases.take_gradients()
        for sign, rounding in ((1, nullcontext()), (-1, Rounding(self._device))):
            self._random.restore()
            self.noise.give(0, rows, of=rows, in_turn=in_turn)
            with self._aliases.in_place(), torch.enable_grad(), in_groups(self._model, self._per_part, self._rows):
                with rounding:
                    run, _ = self._run(self._whole, is_whole=False)
                    self._backward(run.outputs, {i: sign * direction for i, direction in directions.items()})
                outputs = run.without_graph().outputs
                del run
                self._snapshot.restore()
        return outputs, self._norms()

    def _compare_gradients(
        self, residuals: Sequence[float], sizes: Sequence[float], rounded: Callable[[], Sequence[float]]
    ) -> None:
        largest = max((size for size in sizes if size == size), default=0.0)
        off: dict[
            int, tuple[float, float]
        ] = {}  # by the number of the parameter: the difference, and what it is a share of
        for number, (residual, size) in enumerate(zip(residuals, sizes, strict=True)):
            scale = max(size, _LEAST_SHARE * largest)
            if size != size or size == float("inf") or not scale:  # the model's own answer is not finite
                continue
            share = residual / scale if residual == residual else float("inf")
            if share > self._tolerance:
                off[number] = share, scale
        if off and max(share for share, _ in off.values()) < _MOST_ROUNDING:
            by_rounding = rounded()
            off = {
                number: (share, scale)
                for number, (share, scale) in off.items()
                if not share * scale <= TIMES * by_rounding[number]
            }
        if off:
            worst = max(off, key=lambda number: off[number])
            name = self._names.get(id(self._aliases.originals[worst]), "a parameter")
            self._refuse(
                f"the gradient of {self._name} by {name} is {off[worst][0]:.2g} of its size off when the batch is split "
                f"(allowed {self._tolerance:.0e}): rows of a batch depend on each other"
            )

    def _compare_inputs(self, whole: Sequence[Any], parts: Sequence[Sequence[Any]]) -> None:
        for i, gradient in enumerate(whole):
            pieces = [part[i] for part in parts]
            if gradient is None or any(piece is None for piece in pieces):
                continue
            negative = [-piece for piece in pieces]
            tolerance = max(self._tolerance, 1e-4)
            merge = found_merge(None, negative, gradient, self._rows, tolerance)
            if merge is None and close(sum(negative), gradient, tolerance) is False:
                self._refuse(f"the gradient by an input of {self._name} is another one when the batch is split")

    def _check_left_alone(self) -> None:
        for parameter, version in zip(self._aliases.originals, self._versions, strict=True):
            if parameter._version != version:
                self._refuse(f"the forward pass of {self._name} writes to its parameters")

    def _check_backward(self, whole: _Run) -> None:
        """What hooks do in the backward pass they would do once for each part."""
        for i, leaf in enumerate(whole.outputs.leaves):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and leaf.retains_grad:
                self._refuse(f"{whole.outputs.name_of(i)} of {self._name} keeps its gradient (retain_grad)")
        for name, effect in self._snapshot.effects().items():
            leaves, structure = flatten(closed(effect))
            known, known_structure = flatten(whole.effects[name].value) if name in whole.effects else ([], None)
            pairs = zip(leaves, known, strict=False)
            if structure != known_structure or not all(one is other or agree(one, other, 0.0) for one, other in pairs):
                self._refuse(f"the backward pass of {self._name} changes {name}, and would once for each micro-batch")

    def _check_escapes(self, kept: _Run, returned: Sequence[weakref.ref[torch.Tensor]]) -> None:
        """Tensors with a graph that are kept where nobody looked."""
        known = [*kept.outputs.leaves, *self._whole.leaves, *self._model.parameters(), *self._model.buffers()]
        seen = {leaf.untyped_storage()._cdata for leaf in known if type(leaf) in (torch.Tensor, nn.Parameter)}
        torch.clear_autocast_cache()
        if any(leaf() is not None for leaf in returned):
            seen -= {leaf.untyped_storage()._cdata for leaf in kept.outputs.leaves if isinstance(leaf, torch.Tensor)}
        if not self._escaped(seen):
            return
        gc.collect()
        escaped = self._escaped(seen)
        for tensor in escaped:
            self._refuse(
                f"a tensor {list(tensor.shape)} with a graph leaves {self._name} past its output, {_keeper(tensor, escaped)}"
            )

    def _escaped(self, seen: set[int]) -> list[torch.Tensor]:
        survivors = self.noise.survivors - seen
        return [
            tensor
            for tensor in (gc.get_objects() if survivors else ())
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided and _has_graph(tensor)
            and tensor.untyped_storage()._cdata in survivors
        ]  # fmt: skip


def _has_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view of something that was changed since; it cannot be derived
        return False


def _keeper(tensor: torch.Tensor, candidates: list[torch.Tensor]) -> str:
    for holder in gc.get_referrers(tensor):
        if holder is candidates:
            continue
        if isinstance(holder, dict):
            return (
                f"as {next((str(key) for key, value in holder.items() if value is tensor), '?')!r} of a dict or object"
            )
        if isinstance(holder, (list, tuple, set, deque)):
            return f"in a {type(holder).__name__}"
        if not inspect.isframe(holder):
            return f"kept by a {type(holder).__name__}"
    return "kept by something else"


def _unchanged(one: Any, other: Any) -> bool:
    """Return whether an argument is still what it was; packed rows are unpacked anew."""
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return one is other or (both and one.shape == other.shape and bool((one == other).all()))


def _number(value: Any) -> float:
    return float(real(value).detach()) if isinstance(value, torch.Tensor) else float(value)


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    value = real(leaf)
    return value.detach().requires_grad_() if value.requires_grad else value.detach()
