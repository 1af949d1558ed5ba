"""Finding out how a model's batch splits, and how the losses of its parts add up, by looking at a few rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import MemlabError, RefusalError, first_line
from memlab.runtime.aliases import KEEP_WHOLE
from memlab.runtime.autocast import as_fp32, without_autocast
from memlab.runtime.backward import gradients_of
from memlab.runtime.dispatch import HALF
from memlab.runtime.fp32_products import exact_products
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.rng import Randomness, is_generator
from memlab.runtime.surroundings import Surroundings
from memlab.techniques.accumulation.merge import Join, found_join, found_merge, is_ndarray, why_apart
from memlab.techniques.accumulation.noise import Noise, Order, StrangeDrawError
from memlab.techniques.accumulation.rounding import TIMES, Rounding
from memlab.techniques.accumulation.rows import FEW_ROWS, separating_rows, telling_rows
from memlab.techniques.accumulation.split import (
    Call,
    Layout,
    LossRule,
    Outputs,
    is_sparse,
    layouts_of,
    loss_rules,
    weights_by,
)

_T = TypeVar("_T")

_FIELD = "accumulation"
_OWN_LOSS = "let the loop compute the loss from the outputs (any loss works then), or use --checkpoint"
# relative difference up to which two results count as equal: in fp32, and in half precision
_TOLERANCE = 1e-4
_LOW_TOLERANCE = 3e-2
# columns of the probe's outputs that are compared; more than the rows it looks at, should those be the last dimension
_MOST_COLUMNS = 256
# weights that differ by less are the same
_ALIKE_WEIGHTS = 1e-9
# losses of the probe's parts that are closer than this, relatively, tell little about how they add up
_ALIKE = 0.1
LEAST_ROWS = 2  # one apart from another
# further looks at rows that tell rules apart
_MOST_LOOKS = 3
# by how much the weights of two rows must differ for their losses to tell rules apart; gradients differ by more
_LEAST_SPREAD = 0.02
# share by which gradients that come of the same rule may differ, of the rounding of one operation
_ROUNDED = 16
# elements of the parameters whose gradients are looked at
_FEW_ELEMENTS = 2**16
# vectors among which the weights of classes are looked for
_MOST_VECTORS = 8
# whole numbers among which the target that a loss ignores is looked for
_MOST_IGNORED = 8


class Probe:
    """Finds, for one model, how calls split and how scalars add up; remembers what it learnt.

    Over 300 lines: layouts, joins and rules of losses are found by the same trial runs.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        per_part: tuple[type[nn.Module], ...] = (),
        run: Callable[..., Any] | None = None,
        *,
        buffers_alone: bool = False,
        most_rows: int = 3,
    ) -> None:
        self._run = run  # runs it; None for its own `forward`
        self._most_rows = most_rows  # that are looked at together
        # of its state, buffers alone are put back; the rest is that of an engine, which has hooks on it
        self._buffers_alone = buffers_alone
        self._model = model  # the model whose calls are split. It is run without gradients
        self._name = name  # how errors call it
        # kinds of modules that take statistics of each part; they take those of evaluation here
        self._per_part = per_part
        self._ignored: dict[int, None] = {}  # targets that a loss within the model was seen to ignore
        # by kind of call
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        self._rules: dict[tuple[Any, ...], dict[int, list[LossRule]]] = {}
        # of Python's and NumPy's generators, which know no rows: whether rows apart go on where those before ended
        self.goes_on = False
        self.order = Order.ROWS  # in which those of torch follow the rows
        self._draws_on_host = self._draws = False
        # whether a call without gradients fails
        self.needs_graph = False
        self._joins: dict[tuple[Any, ...], tuple[Join | None, ...]] = {}
        # by how much rules differed for parts of a call when a look at them told nothing, and how many such calls there were
        self._undecided: dict[tuple[Any, ...], tuple[float, int]] = {}
        # why the likeliest way in which a call might split is none, and what to do instead
        self._apart: tuple[str, str] | None = None
        self._is_given = False  # whether no other way is likelier

    def serve(self, model: nn.Module | None, name: str = "") -> None:
        """Look at a model of a name; with None keep that no longer, but what was learnt."""
        self._model, self._name = cast("nn.Module", model), name

    def layout(self, call: Call) -> Layout:
        """Return how this call splits. Raises `RefusalError`: no tensor with a batch dimension, or rows that depend on each other."""
        known = self._layouts.get(call.kind)
        return self._of_fewer_rows(lambda: self._found_layout(call)) if known is None else known.of(call)

    def _of_fewer_rows(self, look: Callable[[], _T]) -> _T:
        """Look at three rows, and at two where there is no memory for three: a part of a batch may be a single one."""
        try:
            return look()
        except BaseException as error:
            if self._most_rows == LEAST_ROWS or not is_out_of_memory(error):
                raise
            oom = error
        release(oom)
        del oom  # its traceback holds this frame
        self._most_rows = LEAST_ROWS
        return look()

    def _found_layout(self, call: Call) -> Layout:
        candidates = layouts_of(call)
        if not candidates and any(map(is_sparse, call.leaves)):
            raise RefusalError(
                _FIELD,
                f"the batch of {self._name} is a sparse or nested tensor, which is not split",
                "hand over a dense one",
            )
        if not candidates:
            raise RefusalError(
                _FIELD, f"the call of {self._name} has no tensor argument to split", "pass the batch as tensors"
            )
        if candidates[0].rows < 2 and not any(layout.in_lists and layout.rows >= 2 for layout in candidates):
            return candidates[0]
        failed: list[Exception] = []
        candidates = [layout for layout in candidates if layout.rows >= 2]
        # with gradients only where nothing runs without: a few rows, but techniques below act as in training
        for needs_graph in (self.needs_graph,) if self.needs_graph or self._buffers_alone else (False, True):
            self.needs_graph = needs_graph
            failed.clear()
            self._apart = None
            for needs_rule in (True, False):
                for layout in candidates:
                    if self._fits(call, layout, failed, needs_rule=needs_rule):
                        self._layouts[call.kind] = layout
                        return layout
            if len(failed) < 2 * len(candidates):
                break
        self.needs_graph = False
        assert self._apart is not None
        reason, instead = self._apart
        if len(failed) < 2 * len(candidates) and self._draws_on_host:
            reason = (
                f"the random numbers that {self._name} draws with Python or NumPy do not follow the rows of its batch"
            )
        elif failed and isinstance(failed[-1], StrangeDrawError):
            reason = str(failed[-1])
        square = (candidates[0].rows,) * 2
        if any(isinstance(leaf, torch.Tensor) and leaf.shape == square for leaf in call.leaves):
            reason += f" (one of its arguments is {[*square]}, rows by rows, as of the nodes of one graph)"
        elif any(is_ndarray(leaf) and leaf.shape[:1] == square[:1] for leaf in call.leaves):
            reason += (
                f" (one of its arguments is a NumPy array of {square[0]} rows, which is not split: hand over a tensor)"
            )
        elif failed and (kept := _kept_by_row(self._model, candidates[0].rows)):
            reason += f" (it holds {kept}, with as many rows as the batch)"
        raise RefusalError(_FIELD, reason, instead)

    def joins(self, call: Call) -> tuple[Join | None, ...]:
        """Dimensions along which parts of each output are joined; None for scalars and shared values."""
        return self._joins.get(call.kind, ())

    def weights(self, call: Call, layout: Layout, parts: Sequence[Call]) -> dict[int, list[float]]:
        """Weights of the parts' values in the batch's, for each scalar output with a rule.

        Raises:
            RefusalError: no rule makes the parts' losses add up to the batch's.
        """
        known = self._rules.get(call.kind)
        weightings = {} if known is None else _weightings(known, parts, layout)
        if known is None or self._is_open(call, weightings):
            before = known
            known = self._of_fewer_rows(lambda: self._matching(call, layout, before, parts))
            if not all(known.values()):  # a loss over no target: there is nothing to learn from it
                return {position: [0.0] * len(parts) for position in known}
            self._rules[call.kind] = known
            weightings = _weightings(known, parts, layout)
            self._undecided[call.kind] = _spread(weightings), 1
        return {position: weights[0] for position, weights in weightings.items()}

    def _is_open(self, call: Call, weightings: dict[int, list[list[float]]]) -> bool:
        """Return whether rules that were alike so far weigh parts differently; where a look told nothing, the second, fourth, eighth time."""
        spread = _spread(weightings)
        told, times = self._undecided.get(call.kind, (0.0, 0))
        if spread <= _ALIKE_WEIGHTS or spread > 2 * told:
            return spread > _ALIKE_WEIGHTS
        self._undecided[call.kind] = told, times + 1
        return (times + 1).bit_count() == 1

    def _fits(self, call: Call, layout: Layout, failed: list[Exception], *, needs_rule: bool) -> bool:
        """Return whether outputs of rows run apart are those of rows run together.

        Args:
            call: the model call.
            layout: how it may split.
            failed: gets the error of a model that does not run on some rows.
            needs_rule: where there are only scalars, one of them has to follow a rule.
        """
        for self.goes_on, self.order in (*((False, order) for order in Order), (True, Order.ROWS)):
            try:
                whole, parts = self._look(call, layout, range(min(layout.rows, self._most_rows)))
                joins = self._joins_of(layout, whole, parts, [1, min(layout.rows, self._most_rows) - 1])
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, MemlabError):
                    raise
                failed.append(error)
                is_strange = isinstance(error, StrangeDrawError)
                why = (
                    str(error)
                    if is_strange
                    else f"{self._name} does not run on some rows of a batch: {first_line(error)}"
                )
                self._give(layout, why, ran=False)
                return False
            if joins is not None and (not needs_rule or self._is_telling(call, layout, whole, parts)):
                self._joins[call.kind] = joins
                return True
            if not (self._draws_on_host or self._draws):
                break
        return False

    def _is_telling(self, call: Call, layout: Layout, whole: Outputs, parts: list[Outputs]) -> bool:
        """Return whether outputs speak for a layout: a tensor that was joined, or a scalar that follows a rule."""
        tensors = [i for i, leaf in enumerate(whole.leaves) if isinstance(leaf, torch.Tensor)]
        if any(i not in whole.scalars for i in tensors) or any(bool(whole.leaves[i].isnan()) for i in tensors):
            return True
        call = layout.view(call)
        picked = [layout.pick(call, [0]), layout.pick(call, range(1, min(layout.rows, self._most_rows)))]
        rules = loss_rules(call, layout, class_weights_of(self._model, call, layout), [*self._ignored])
        weightings = weights_by(rules, picked, layout)
        return all(
            _closest(
                rules, weightings, [self._number(part, i) for part in parts], float(whole.leaves[i]), self._tolerance
            )
            for i in tensors
        )

    def _give(self, layout: Layout, reason: str, instead: str = KEEP_WHOLE, *, ran: bool = True) -> None:
        """Note why a call does not split so: the first reason counts, but for tensors in lists that were cut where they did not run."""
        if self._apart is None or (layout.in_lists and not self._is_given):
            self._apart, self._is_given = (reason, instead), ran or layout.in_lists

    def _joins_of(
        self, layout: Layout, whole: Outputs, parts: list[Outputs], sizes: list[int]
    ) -> tuple[Join | None, ...] | None:
        """Return where each output is joined; None where the parts do not make the whole."""
        joins: list[Join | None] = []
        if any(part.spec != whole.spec for part in parts):
            other = f"what {self._name} returns has another structure for some rows of a batch than for more"
            self._give(layout, other)
            return None
        for i, leaf in enumerate(whole.leaves):
            if i in whole.scalars or not isinstance(leaf, torch.Tensor):
                joins.append(None)
                continue
            pieces = [part.leaves[i] for part in parts]
            joins.append(found_join(leaf, pieces, sizes, self._tolerance))
            if joins[-1] is None and found_merge(None, pieces, leaf, sizes, self._tolerance) is None:
                name = whole.name_of(i)
                why = why_apart(name, self._name, leaf, pieces, sizes, Join(0), self._tolerance)
                self._give(layout, *why)
                return None
        return tuple(joins)

    def _matching(
        self, call: Call, layout: Layout, known: dict[int, list[LossRule]] | None, parts: Sequence[Call]
    ) -> dict[int, list[LossRule]]:
        call = layout.view(call)
        every = loss_rules(call, layout, class_weights_of(self._model, call, layout), [*self._ignored])
        one, *more = telling_rows(call, layout, every)
        rows = [one, *more[1 - self._most_rows :]]
        found, outputs = self._holding(call, layout, rows, lambda position: (known or {}).get(position, every))
        if found.get(outputs[0].loss) and _alike(outputs):
            # nearly the same loss in both parts: almost any function of it would do, so look at rows that differ
            rows = self._unlike_rows(call, layout)
            found, outputs = self._holding(call, layout, rows, lambda position: found.get(position, []))
        for _ in range(_MOST_LOOKS):
            weightings = _weightings(found, parts, layout)
            at = next((each for each in found if _spread({each: weightings[each]}) > _ALIKE_WEIGHTS), None)
            pair = None if at is None else separating_rows(call, layout, found[at])
            if at is None or pair is None:
                break
            by_gradients = self._by_gradients(call, layout, pair, at, found[at])
            if by_gradients is not None:
                if len(by_gradients) == len(found[at]):
                    break
                found[at] = by_gradients
                continue
            pair = separating_rows(call, layout, found[at], _LEAST_SPREAD)
            if pair is None:
                break
            rows = pair
            found, outputs = self._holding(call, layout, rows, lambda position, found=found: found.get(position, []))  # type: ignore[misc]
        whole = outputs[0]
        if whole.loss >= 0 and whole.loss not in found:
            if whole.leaves[whole.loss].isnan():
                return {whole.loss: []}
            together, first, others = (f"{float(each.leaves[whole.loss]):.4g}" for each in outputs)
            raise RefusalError(
                _FIELD,
                f"the loss of {self._name} is not a mean or sum over rows or targets, so micro-batches cannot give its gradient: "
                f"for {len(rows)} rows together it is {together}, for them in two parts {first} and {others}",
                _OWN_LOSS,
            )
        return found

    def _holding(
        self, call: Call, layout: Layout, rows: Sequence[int], candidates: Callable[[int], list[LossRule]]
    ) -> tuple[dict[int, list[LossRule]], list[Outputs]]:
        """The rules that hold for the first of these rows and the others, and what was run: together, apart."""
        parts = [layout.pick(call, rows[:1]), layout.pick(call, rows[1:])]
        whole, outputs = self._look(call, layout, rows)
        found: dict[int, list[LossRule]] = {}
        for position in whole.scalars:
            rules = candidates(position)
            holding = _closest(
                rules,
                weights_by(rules, parts, layout),
                [self._number(output, position) for output in outputs],
                float(whole.leaves[position]),
                self._tolerance,
            )
            if holding:
                found[position] = holding
        return found, [whole, *outputs]

    def _by_gradients(
        self, call: Call, layout: Layout, rows: Sequence[int], position: int, rules: list[LossRule]
    ) -> list[LossRule] | None:
        """Return the rules by which gradients of two rows add up, where losses are too near each other to tell; None where that is not seen."""
        fewest = sorted(
            (p for p in self._model.parameters() if p.requires_grad and not p._backward_hooks), key=torch.numel
        )
        few = [
            p for p, total in zip(fewest, accumulate(map(torch.numel, fewest)), strict=True) if total <= _FEW_ELEMENTS
        ]
        if self.is_low or not few or self._buffers_alone or isinstance(few[0], FakeTensor):
            return None
        found: list[torch.Tensor] = []
        wide = self._widened(call)
        try:
            with self._quietly(order=self.order, goes_on=self.goes_on) as quiet, torch.enable_grad():
                # the two rows once more with noise: some gradients are mostly rounding
                for start, stop, noise in (
                    (0, 2, nullcontext()),
                    (0, 1, nullcontext()),
                    (1, 2, nullcontext()),
                    (0, 2, Rounding(few[0].device)),
                ):
                    with noise:
                        output = quiet.run(layout.pick(wide, rows[start:stop]), (start, stop, 2))
                        gradients = quiet.gradients(Outputs.of(output).leaves[position], few)
                    del output
                    found.append(torch.cat([each.cpu().flatten().double() for each in gradients if each is not None]))
        except Exception as error:  # noqa: BLE001 - no memory for a graph, or a model that makes none here
            release(error)
            return None
        whole, *apart, rounded = found
        sizes = [float(each.norm()) for each in (whole, *apart)]
        if any(len(each) != len(whole) for each in found) or not max(sizes) or not all(map(math.isfinite, sizes)):
            return None
        parts = [layout.pick(call, [row]) for row in rows]
        errors = [
            float((whole - weights[0] * apart[0] - weights[1] * apart[1]).norm()) / max(sizes)
            for weights in weights_by(rules, parts, layout)
        ]
        rounding = TIMES * float((whole - rounded).norm()) / max(sizes)
        if min(errors) > max(self._tolerance, rounding):
            raise RefusalError(
                _FIELD,
                f"the loss of {self._name} is not a mean or sum over rows or targets, so micro-batches cannot give its gradient: "
                f"for two rows that is {min(errors):.2g} off (allowed {self._tolerance:.0e})",
                _OWN_LOSS,
            )
        bound = 10 * min(errors) + max(_ROUNDED * torch.finfo(few[0].dtype).eps, rounding)
        return [rule for rule, error in zip(rules, errors, strict=True) if error <= bound]

    def _number(self, outputs: Outputs, position: int) -> float:
        """Return a scalar among outputs, which every part of a batch has to have. Raises `RefusalError`: this part has none."""
        number = outputs.leaves[position]
        if not isinstance(number, torch.Tensor):
            reason = f"{self._name} returns a number for a whole batch and none for some of its rows"
            raise RefusalError(_FIELD, reason, KEEP_WHOLE)
        return float(number)

    def _unlike_rows(self, call: Call, layout: Layout) -> list[int]:
        """The two rows whose losses are furthest apart, of the first few."""
        losses = []
        with self._quietly() as quiet:
            for row in range(min(layout.rows, FEW_ROWS)):
                outputs = Outputs.of(quiet.run(self._widened(layout.pick(call, [row])), None)).without_graph()
                losses.append((self._number(outputs, outputs.loss), row))
        ordered = sorted((loss, row) for loss, row in losses if math.isfinite(loss))
        return [ordered[0][1], ordered[-1][1]]

    def _look(self, call: Call, layout: Layout, rows: Sequence[int]) -> tuple[Outputs, list[Outputs]]:
        call = self._widened(call)
        spans = ((0, len(rows)), (0, 1), (1, len(rows)))
        for order in dict.fromkeys((self.order, Order.IN_TURN, Order.ROWS)):
            try:
                generators = filter(is_generator, call.leaves)
                with self._quietly(order=order, goes_on=self.goes_on, generators=generators) as quiet:
                    together, *apart = (
                        _sampled(
                            Outputs.of(
                                quiet.run(layout.pick(call, rows[slice(*span)]), (*span, len(rows)))
                            ).without_graph()
                        )
                        for span in spans
                    )
            except StrangeDrawError:
                continue
            self._draws_on_host, self._draws = quiet.draws_on_host, quiet.noise.any_drawn
            self._ignored = dict.fromkeys([*self._ignored, *quiet.noise.ignored][:_MOST_IGNORED])
            return together, apart
        raise StrangeDrawError(f"the random numbers that {self._name} draws do not follow the rows of its batch")

    @contextmanager
    def _quietly(
        self, *, order: Order = Order.ROWS, goes_on: bool = False, generators: Iterable[Any] = ()
    ) -> Iterator[Quiet]:
        """Look at the model's outputs, without gradients unless it needs them; buffers, attributes and random states stay as they were.

        The mode stays that of training: what depends on other rows only then must be seen, and layers that repack their weights for
        evaluation must not do so.
        """
        quiet = Quiet(self._model, self._run or self._model.forward, order, goes_on, generators, self._buffers_alone)
        # a twin of fakes has no values that could depend on the mode
        changed = nn.Module if quiet.is_fake else self._per_part
        training = [module for module in self._model.modules() if isinstance(module, changed) and module.training]
        try:
            for module in training:
                module.training = False
            with torch.set_grad_enabled(self.needs_graph), without_autocast(), exact_products():
                yield quiet
        finally:
            for module in training:
                module.training = True
            quiet.put_back()

    def _widened(self, call: Call) -> Call:
        """Return a call without what Fabric has cast for a model under autocast: the probe runs without."""
        return call if self._has_half_parameters else call.with_leaves([*map(as_fp32, call.leaves)])

    @property
    def _has_half_parameters(self) -> bool:
        return any(p.dtype in HALF for p in self._model.parameters())

    @property
    def is_low(self) -> bool:
        """Return whether the model computes in half precision by itself."""
        # Accelerate's mixed precision runs inside forward and keeps the original beside it
        return self._has_half_parameters or "_original_forward" in self._model.__dict__

    @property
    def _tolerance(self) -> float:
        return _LOW_TOLERANCE if self.is_low else _TOLERANCE


def _sampled(outputs: Outputs) -> Outputs:
    """The same outputs, wide ones cut short along their last dimension.

    Comparing them needs no more, and the logits of three rows may be larger than a whole micro-batch.
    """
    return replace(outputs, leaves=tuple(_cut_short(leaf) for leaf in outputs.leaves))


def _cut_short(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2 or leaf.size(-1) <= _MOST_COLUMNS:
        return leaf
    return leaf.narrow(-1, 0, _MOST_COLUMNS).clone()


def _closest(
    rules: list[LossRule], weightings: list[list[float]], values: list[float], target: float, tolerance: float
) -> list[LossRule]:
    """The rules whose weighted sum meets the target: the best one, and those that are as good."""
    if not rules:
        return []
    size = max(abs(target), *(abs(value) for value in values), 1e-6)
    errors = [
        abs(sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) - target) / size
        for weights in weightings
    ]
    bound = min(tolerance, 10 * min(errors) + 1e-6)
    return [rule for rule, error in zip(rules, errors, strict=True) if error <= bound]


def _alike(outputs: Sequence[Outputs]) -> bool:
    """Return whether the losses of the parts are near each other; not when they are the same, as those of a twin are."""
    _, one, other = (float(output.leaves[output.loss]) for output in outputs)
    return 0 < abs(one - other) < _ALIKE * max(abs(one), abs(other))


def _weightings(
    rules: Mapping[int, list[LossRule]], parts: Sequence[Call], layout: Layout
) -> dict[int, list[list[float]]]:
    """Return the weights by each rule, for each output that rules hold for."""
    weightings = iter(weights_by([rule for each in rules.values() for rule in each], parts, layout))
    return {position: [next(weightings) for _ in each] for position, each in rules.items()}


def _spread(weightings: Mapping[int, list[list[float]]]) -> float:
    """Return by how much rules differ at most in what they give a part."""
    return max(
        (max(of_part) - min(of_part) for each in weightings.values() for of_part in zip(*each, strict=True)),
        default=0.0,
    )


def class_weights_of(model: nn.Module, call: Call, layout: Layout) -> list[torch.Tensor]:
    """Vectors that a loss may weigh classes with: buffers, attributes and arguments."""
    found = [leaf for i, leaf in enumerate(call.leaves) if i not in layout.split]
    for module in model.modules():
        found += [*module._buffers.values(), *module.__dict__.values()]
    vectors = [
        each.detach()
        for each in found
        if isinstance(each, torch.Tensor) and each.dim() == 1 and each.is_floating_point() and 2 <= len(each) <= 4096
    ]
    return vectors[:_MOST_VECTORS]


def _kept_by_row(model: nn.Module, rows: int) -> str:
    """Name of a buffer or attribute with a row for each of a batch; empty where there is none."""
    return next(
        (
            name
            for module in model.modules()
            for name, value in (*module._buffers.items(), *vars(module).items())
            if isinstance(value, torch.Tensor) and value.dim() and value.size(0) == rows
        ),
        "",
    )


class Quiet:
    """Runs of a model that leave nothing behind."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[..., Any],  # runs it
        order: Order,  # in which random numbers are given, see `Noise`
        goes_on: bool,  # Python's and NumPy's generators go on from one run apart to the next
        generators: Iterable[Any],  # of random numbers, among the arguments
        buffers_alone: bool,  # of the model's state, buffers alone are put back
    ) -> None:
        self._run = run
        self._order = order
        self.goes_on = goes_on
        self.draws_on_host = False
        self.is_fake = any(isinstance(parameter, FakeTensor) for parameter in model.parameters())
        self._snapshot = None if self.is_fake else Surroundings(model, complete=True, buffers_alone=buffers_alone)
        own = [*(self._snapshot.generators if self._snapshot is not None else ()), *generators]
        self._random = Randomness(own)
        self.noise = Noise()
        self._parameters = [] if self.is_fake else [p for p in model.parameters() if p.is_leaf]

    def run(self, call: Call, span: tuple[int, int, int] | None) -> Any:
        """Run some of the rows.

        Args:
            call: they.
            span: the first, the one after the last, and how many were run together, whose random numbers they get; None for
                numbers of their own.
        """
        start, stop, together = span or (0, 0, 0)
        is_apart = (start, stop) != (0, together)
        if is_apart:
            self.noise.give(start, stop, of=together, order=self._order)
        writing = nullcontext() if self._snapshot is None else self._snapshot.writing()
        with self._gradients_apart(), writing, nullcontext() if span is None or self.is_fake else self.noise:
            output = call.run(self._run)
        self.draws_on_host |= not self.is_fake and self._random.host_differs()
        self.put_back(host=not (is_apart and self.goes_on))
        return output

    def gradients(self, output: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return gradients of what was run last; parts that are computed again for them draw what they drew."""
        self.noise.repeat()
        with self.noise:
            found = gradients_of(output, parameters)
        self.put_back()
        return found

    @contextmanager
    def _gradients_apart(self) -> Iterator[None]:
        """Context of a run, for a model that runs a backward pass itself."""
        before = [(p, p.grad) for p in self._parameters if p.grad is None or p.grad.device == p.device]
        for parameter, gradient in before:
            if gradient is not None:
                parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in before:
                if parameter.grad is not gradient:
                    parameter.grad = gradient

    def put_back(self, *, host: bool = True) -> None:
        """Put back all that the run has changed; without `host` all but Python's and NumPy's generators."""
        if self._snapshot is not None:
            self._snapshot.begin_again()
        self._random.restore(host=host)
