"""Batches without their padding: the model is called with all rows one after another.

Numbered rules:

1. A call with an `attention_mask` of rows × positions that ends rows early is run with one row: what each row has before its padding,
   `position_ids` that begin anew with each row, and no mask. Attention that keeps rows apart by such positions gives what it gave.
2. What is returned is put back into the shape of the batch. At padding stand values of other positions, of which a use shows: a
   gradient that arrives there is refused. (Of zeros many a use, such as a square, has no gradient.) Beside a loss that the model
   returns, this is done when the loop looks.
3. The first label of each row is ignored, as the last position of the row before would predict it.
4. The first call of each shape, and under each condition, is run both ways by the judge of accumulation, from the same state, and has to
   return and leave the same, with the same gradients. Random numbers follow positions, so a model that draws some is refused; so is one
   that chooses by values it has computed: no batch tells what it does with the next one.
5. A plan on trial is to end no loop: its first step keeps the padding, and it is seen whether gradients arrive there.
6. What has no padding is run as it is. A later batch that cannot be packed is run as it is as well, and the receipt says so.

Sources: `DataCollatorWithFlattening` of Transformers, https://huggingface.co/blog/packing-with-FA2; Krell et al., "Efficient Sequence
Packing without Cross-contamination", https://arxiv.org/abs/2107.02027
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memlab.errors import MemlabError, RefusalError, first_line
from memlab.plan import Plan, Precision
from memlab.runtime import accelerator
from memlab.runtime.graphs import refuse_within_checkpoint
from memlab.runtime.hooks import is_compiled
from memlab.runtime.lazy import LazyTensor, real, with_graph
from memlab.runtime.mechanisms import SeenInCalls, brought
from memlab.runtime.modules import (
    CACHE_NAMES_OF_DECODERS,
    CacheOff,
    cache_off,
    refuse_kept_weights,
    signature_of,
)
from memlab.runtime.out_of_memory import is_out_of_memory, release
from memlab.runtime.surroundings import Surroundings
from memlab.runtime.tree import flatten
from memlab.runtime.workload import Workload
from memlab.techniques.accumulation.conditions import Conditions
from memlab.techniques.accumulation.judge import Judge
from memlab.techniques.accumulation.known_verdicts import shape_of
from memlab.techniques.accumulation.merge import Join
from memlab.techniques.accumulation.noise import StrangeDrawError
from memlab.techniques.accumulation.probe import Probe
from memlab.techniques.accumulation.split import Call, Layout, Outputs
from memlab.techniques.base import Description, ModelCall, Reduces, Technique, Traits

_FIELD = "padding"
_FULL = (Precision.KEEP, Precision.FP32)
_MASK, _POSITIONS, _LABELS = "attention_mask", "position_ids", "labels"
_IGNORED = -100
_WATCHING = "the first step keeps its padding: it is seen whether the loop uses what is computed there"
_FAR_APART = 7919  # positions whose values stand side by side in padding: a prime, so that they are not alike
_PACKED = "memlab: rows one after another"  # marks the calls of the judge that are packed


class Packing(Technique, SeenInCalls):
    """Run training calls without the padding of their batch.

    Known limitations: padding that stands before a row (on the left) or within it stays. Outputs at padding are those of other
    positions, which is not noticed where they are looked at without gradients (an accuracy over all positions).
    """

    field = _FIELD
    traits = Traits(Reduces.ACTIVATIONS)
    learns_from_calls = True
    descriptions = (
        Description(
            flags="--pack",
            saves="what is computed at padding",
            costs="attention computes scores between all rows, but for kernels that leave them out (flash-attention)",
            exactness="same gradient (≤ 2e-5 relative in fp32); other outputs at padding",
            gives_nothing="batches have no padding, or attention keeps its scores (eager); refused with dropout, padding on the left, and where attention does not keep rows apart by position_ids",
        ),
    )

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._model: nn.Module
        self._name = ""
        self._is_fake = self._has_packed = self._is_withdrawn = False
        self._is_watched = self._is_seen = False  # whether a step that keeps its padding has begun, and ended
        self._cache_off = CacheOff(self.field)
        self._conditions = Conditions()
        self._verdicts: dict[Any, RefusalError | None] = {}

    def check(self, workload: Workload) -> None:
        if not _takes(workload.model, _POSITIONS):
            raise _refusal(
                f"{workload.name} takes no {_POSITIONS}, by which attention would keep rows apart that stand one after another"
            )
        if is_compiled(workload.model):
            raise _refusal(f"{workload.name} is compiled, and would be compiled anew for each number of positions")

    def attach_model(self, workload: Workload, undo: ExitStack) -> None:
        self._model, self._name, self._is_fake = workload.model, workload.name, not workload.has_values
        undo.callback(self._forget)

    def _forget(self) -> None:
        del self._model
        self._conditions, self._verdicts = Conditions(), {}

    def step_ended(self, optimizer: torch.optim.Optimizer, *, skipped: bool) -> None:
        self._cache_off.step_ended()
        if self._is_watched and not (self._is_seen or self._is_withdrawn):
            self._is_seen = True
            self.host.only_watched()

    def forward(self, call: ModelCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is_withdrawn:
            return call(*args, **kwargs)
        try:
            batch = PaddedBatch.of(self._model, self._name, args, kwargs)
            if batch is None:
                self.notes.once("a batch without padding is run as it is")
                return call(*args, **kwargs)
            self._refuse_call(batch.arguments)
            batch.arguments |= self._cache_off.options(self._model, self._name, _without_positions(batch.arguments))
            if not self._is_fake:
                self._judge(call, batch)
            if self.host.on_trial() and not (self._has_packed or self._is_seen):
                self._is_watched = True
                self.notes.once(_WATCHING)
                return batch.watched(call(*args, **kwargs), self._withdraw)
            with cache_off(self._model, _without_positions(batch.arguments)):
                run = batch.run_packed if self._is_fake else batch.run_or_refuse
                output = run(call, self._refuse_padding)
        except RefusalError as refusal:
            if not self._has_packed:
                raise
            # the loop has come this far under the plan: a batch that cannot be packed must not end it
            self.notes.once(f"a batch is run as it is, since {refusal.reason}")
            return call(*args, **kwargs)
        self._has_packed = True
        if _WATCHING in self.notes:
            self.notes.remove(_WATCHING)
        kept, whole = sum(batch.lengths), len(batch.lengths) * batch.positions
        said = f"rows one after another: {kept:,} of {whole:,} positions of the last batch"
        self.notes[:] = [said, *(note for note in self.notes if not note.startswith(said[:22]))]
        return output

    def _refuse_call(self, arguments: Mapping[str, Any]) -> None:
        """Refuse what cannot be compared, or run in another shape."""
        refuse_kept_weights(self.field, self._model, self._name)
        refuse_within_checkpoint(self.field, self._name)
        if arguments.get("use_cache") or any(arguments.get(name) is not None for name in CACHE_NAMES_OF_DECODERS):
            raise _refusal(f"the loop asks {self._name} for a key-value cache, in which all rows would be one")

    def _refuse_padding(self) -> None:
        refusal = self._uses_padding()
        self.host.refused(refusal)
        raise refusal

    def _withdraw(self) -> None:
        """Leave the step that is watched as it is, and the plan."""
        refusal = self._uses_padding()
        if not self.host.withdraw(refusal):
            raise refusal
        self._is_withdrawn = True

    def _uses_padding(self) -> RefusalError:
        return RefusalError(
            self.field,
            f"the loop uses what {self._name} returns at padding, where a batch without padding has nothing",
            "leave padding out of the loss (labels of -100), or leave --pack out",
            in_loop=True,
        )

    # -- the first call of each shape --------------------------------------------------------------

    def _judge(self, call: ModelCall, batch: PaddedBatch) -> None:
        """Refuse a call whose packed run gives something else than the one as it is; asked once for each shape and condition."""
        whole = Call.of((), batch.arguments)
        layout = _AsOne(len(batch.lengths), tuple((place, 0) for place in batch.places(whole)))
        surroundings = Surroundings(self._model)
        if surroundings.unreadable:
            raise _refusal(
                f"{self._name} reads {surroundings.unreadable[0]}, which cannot be put back to compare two runs"
            )

        def shape() -> Any:
            condition = self._conditions.key(whole.by_list(), surroundings.contents)
            # one row alone does not tell whether rows are kept apart
            return condition, sum(map(bool, batch.lengths)) > 1, shape_of(self._model, whole, layout, 1)

        if shape() not in self._verdicts:
            verdict = self._judged(call, whole, layout, batch)
            self._verdicts[shape()] = verdict  # where what it writes to is no condition any more
            for each in brought(self.host.techniques(), SeenInCalls):
                each.trial_over()
            self.host.only_tried()
            if accelerator.is_accelerator(batch.arguments[_MASK].device):
                accelerator.empty_cache()  # both runs reserve more than the steps that follow need
        if (refusal := self._verdicts[shape()]) is not None:
            raise refusal.with_traceback(None)

    def _judged(self, call: ModelCall, whole: Call, layout: Layout, batch: PaddedBatch) -> RefusalError | None:
        both = partial(_both_ways, self._model, self._name, call)
        judge = Judge(
            self._model, self._name, _NoRules(self._model, self._name), is_low=self.plan.precision not in _FULL
        )
        # where there is no memory for all rows, the longest and the shortest
        longest_first = sorted(range(layout.rows), key=lambda row: -batch.lengths[row])
        fewest = layout.pick(whole, [longest_first[0], longest_first[-1]])
        for rows in (whole, fewest):
            if rows is whole and layout.rows > 2 and not judge.has_room_for(both, whole, layout, layout.rows):
                continue
            try:
                found = judge.compared(both, rows, layout.of(rows), [(0, layout.rows_in(rows))])
            except RefusalError as refusal:
                if refusal.technique == self.field:
                    return refusal
                if judge.draws or judge.differs:
                    return self._reason_against(draws=judge.draws, differs=judge.differs)
                return _refusal(f"{self._name} cannot be compared with and without padding: {refusal.reason}")
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                oom = error
            else:
                self._conditions.leave_out([*found.left, *found.changing])
                return self._reason_against(draws=found.draws, chooses=found.chooses)
            release(oom)
            gc.collect()
        return RefusalError(
            self.field,
            f"there is no memory for two rows of a batch of {self._name}, with and without padding, to compare them",
            "use --checkpoint with it, or --accumulate N instead",
        )

    def _reason_against(self, *, draws: bool, differs: bool = False, chooses: bool = False) -> RefusalError | None:
        if draws:
            return RefusalError(
                self.field,
                f"{self._name} draws random numbers (dropout), one for each position, and would draw others without padding",
                "set dropout to 0, or leave --pack out",
            )
        if differs:
            return _refusal(
                f"{self._name} returns or keeps something else where rows stand one after another: its attention does not keep them apart "
                f"by {_POSITIONS}, its loss does not predict the next position, or what it counts depends on padding"
            )
        if chooses:
            return _refusal(
                f"{self._name} chooses by values that it has computed (routed experts): one batch does not tell what others do"
            )
        return None


@dataclass
class PaddedBatch:
    """A call whose rows end in padding."""

    arguments: dict[str, Any]  # by name
    lengths: list[int]  # of each row, in positions
    positions: int  # of the longest row, with padding
    name: str  # how errors call the model

    @classmethod
    def of(cls, model: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PaddedBatch | None:
        """Return what a call is given; None where it has no padding.

        Raises:
            RefusalError: it cannot be packed.
        """
        arguments = _by_name(model, args, kwargs)
        mask = arguments.get(_MASK)
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            raise _refusal(f"{name} is called without an {_MASK} of rows × positions, which says what is padding")
        if isinstance(mask, FakeTensor) or mask.is_meta:
            raise _refusal(
                f"the {_MASK} of {name} has no values in a prediction, which knows those of whole numbers and small masks alone"
            )
        rows, positions = mask.shape
        known = arguments.get(_POSITIONS)
        lengths, *wrong = _facts_of(mask, arguments.get(_LABELS), known)
        if sum(lengths) in (0, rows * positions) and not wrong[0]:
            return None
        for is_so, reason in zip(
            wrong,
            (
                f"the {_MASK} of {name} has padding before or within rows, not after them, or other values than 0 and 1",
                f"labels of {name} count padding, that is, are not -100 there",
                f"the {_POSITIONS} that {name} is called with do not count from 0 in each row",
            ),
            strict=True,
        ):
            if is_so:
                raise _refusal(reason)
        whole = Call.of((), arguments)
        for leaf, path in zip(whole.leaves, whole.spec.names(), strict=True):
            is_of_batch = isinstance(leaf, torch.Tensor) and leaf.numel() != 1 and leaf is not known
            if is_of_batch and leaf.shape[:2] != mask.shape:
                raise _refusal(
                    f"the argument{path.removeprefix('[1]')} of {name} is {[*leaf.shape]}, not of {rows} rows × {positions} positions"
                )
        return cls(arguments, lengths, positions, name)

    def places(self, whole: Call) -> list[int]:
        """Places, among all arguments, of what has rows and positions."""
        shape = (len(self.lengths), self.positions)
        return [i for i, leaf in enumerate(whole.leaves) if isinstance(leaf, torch.Tensor) and leaf.shape[:2] == shape]

    def run_packed(self, call: ModelCall, refuse_padding: Callable[[], None]) -> Any:
        """Run the call with all rows one after another; what it returns has the shape of the batch again."""
        whole = Call.of((), self.arguments)
        leaves = list(whole.leaves)
        for place in self.places(whole):
            kept = [row[:length] for row, length in zip(leaves[place], self.lengths, strict=True)]
            leaves[place] = torch.cat(kept)[None]
        _, packed = whole.spec.put(leaves)
        mask = self.arguments[_MASK]
        packed[_MASK] = None
        packed[_POSITIONS] = torch.cat([torch.arange(length, device=mask.device) for length in self.lengths])[None]
        if _has_shape(packed.get(_LABELS), packed[_POSITIONS]):
            firsts = [start for start, length in zip(self._starts, self.lengths, strict=True) if length]
            packed[_LABELS] = packed[_LABELS].index_fill(1, torch.tensor(firsts, device=mask.device), _IGNORED)
        outputs = Outputs.of(call(**packed))
        leaves = list(outputs.leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.numel() != 1:
                if leaf.shape[:2] != (1, sum(self.lengths)):
                    raise _refusal(
                        f"{self.name} returns {outputs.name_of(place)} {[*leaf.shape]}, which cannot be put back into rows"
                    )
                leaves[place] = self.placed(leaf, refuse_padding, later=outputs.loss >= 0)
        return outputs.rebuild(leaves)

    def run_or_refuse(self, call: ModelCall, refuse_padding: Callable[[], None]) -> Any:
        """The same; where the model ends in an error, the call is refused."""
        try:
            return self.run_packed(call, refuse_padding)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, (MemlabError, StrangeDrawError)):
                raise
            reason = f"{self.name} does not run where rows stand one after another: {first_line(error)}"
            raise _refusal(reason) from None

    @property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)][:-1]

    def placed(self, leaf: torch.Tensor, refuse_padding: Callable[[], None], *, later: bool) -> torch.Tensor:
        """Put what stands in one row, [1, n, ...], back into rows, [b, s, ...]; later, where it is not likely to be looked at."""
        lengths, shape = self.lengths, (len(self.lengths), self.positions, *leaf.shape[2:])

        def place(values: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = _Placed.apply(values, lengths, shape[1], refuse_padding)  # type: ignore[no-untyped-call]
            return found

        def gradients(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
            return (_taken(gradient, lengths, refuse_padding),)

        if isinstance(leaf, LazyTensor):
            return leaf.with_rows_placed(place)
        if not (later and leaf.is_floating_point()):
            return place(leaf)
        found: torch.Tensor = with_graph(
            lambda: LazyTensor(shape, leaf.dtype, leaf.device, lambda: place(leaf)), (leaf,), gradients
        )
        return found

    def watched(self, output: Any, if_used: Callable[[], None]) -> Any:
        """Return an output of rows with padding; where a gradient arrives at padding, something is called."""
        outputs, spec = flatten(output)

        def watch(leaf: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = _Watched.apply(leaf, self.lengths, if_used)  # type: ignore[no-untyped-call]
            return found

        for place, leaf in enumerate(outputs):
            is_of_rows = isinstance(leaf, torch.Tensor) and leaf.shape[:2] == (len(self.lengths), self.positions)
            if is_of_rows and isinstance(leaf, LazyTensor):
                outputs[place] = leaf.with_rows_placed(watch)
            elif is_of_rows and leaf.requires_grad:
                outputs[place] = watch(leaf)
        return spec.put(outputs)

    def without_padding(self, output: Any) -> Any:
        """Return an output of rows with zeros at padding."""
        outputs, spec = flatten(output)
        shape = (len(self.lengths), self.positions)
        lengths = torch.tensor(self.lengths, device="cpu")[:, None]
        is_kept = torch.arange(self.positions, device="cpu") < lengths  # [b, s]
        for place, leaf in enumerate(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.shape[:2] == shape:
                kept = is_kept.to(leaf.device).reshape(*shape, *[1] * (leaf.dim() - 2))
                outputs[place] = torch.where(kept, real(leaf), 0)
        return spec.put(outputs)


class _Placed(torch.autograd.Function):
    """Rows that stand one after another, in rows of one length."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, lengths: Sequence[int], positions: int, refuse_padding: Callable[[], None]
    ) -> torch.Tensor:
        ctx.lengths, ctx.refuse_padding = lengths, refuse_padding
        placed = values.new_empty(len(lengths), positions, *values.shape[2:])
        steps = torch.arange(positions, device=values.device) * _FAR_APART
        for row, part in zip(placed, torch.split(values[0], [*lengths]), strict=True):
            row[: len(part)] = part
            row[len(part) :] = values[0].index_select(0, steps[len(part) :] % values.shape[1])
        return placed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _taken(gradients[0], ctx.lengths, ctx.refuse_padding), None, None, None


class _Watched(torch.autograd.Function):
    """Padded rows as they are, whose gradients are looked at."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, lengths: Sequence[int], if_used: Callable[[], None]) -> torch.Tensor:
        ctx.lengths, ctx.if_used = lengths, if_used
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if _uses_padding(gradients[0], ctx.lengths):
            ctx.if_used()
        return gradients[0], None, None


def _taken(gradient: torch.Tensor, lengths: Sequence[int], refuse_padding: Callable[[], None]) -> torch.Tensor:
    """Return the gradient of rows that stand one after another, from that of padded ones."""
    if _uses_padding(gradient, lengths):
        refuse_padding()
    return torch.cat([row[:length] for row, length in zip(gradient, lengths, strict=True)])[None]


def _uses_padding(gradient: torch.Tensor, lengths: Sequence[int]) -> bool:
    """Return whether a gradient of padded rows arrives at padding; one that is not finite trains nothing."""
    rows = zip(gradient.detach(), lengths, strict=True)
    padding = [row[length:].nan_to_num(0, 0, 0).any() for row, length in rows if length < len(row)]
    return not isinstance(gradient, FakeTensor) and bool(torch.stack(padding).any())


@dataclass(frozen=True)
class _AsOne(Layout):
    """Rows of a batch that the judge runs as they are, and one after another."""

    def take(self, call: Call, start: int, stop: int) -> Call:
        rows = super().take(call, start, stop)
        _, arguments = rows.spec.put(rows.leaves)
        return Call.of((), {**arguments, _PACKED: True})


class _NoRules(Probe):
    """Nothing is known of how losses of rows add up: all rows are run both times."""

    def weights(self, call: Call, layout: Layout, parts: Sequence[Call]) -> dict[int, list[float]]:
        return {}

    def joins(self, call: Call) -> tuple[Join | None, ...]:
        return ()


def _both_ways(model: nn.Module, name: str, call: ModelCall, **arguments: Any) -> Any:
    """Run a call of the judge as it is marked, with zeros at padding either way."""
    is_packed = arguments.pop(_PACKED, False)
    batch = PaddedBatch.of(model, name, (), arguments)
    with cache_off(model, _without_positions(arguments)):
        if batch is None:
            return call(**arguments)
        if not is_packed:
            return batch.without_padding(call(**arguments))
        return batch.without_padding(batch.run_or_refuse(call, lambda: None))


def _refusal(reason: str) -> RefusalError:
    return RefusalError(_FIELD, reason, "leave --pack out, and group samples of like length in the loader")


def _without_positions(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without positions, which need a cache no more than the default ones: they are the same."""
    return {name: value for name, value in arguments.items() if name != _POSITIONS}


def _takes(model: nn.Module, name: str) -> bool:
    kinds = signature_of(model.forward).parameters
    return name in kinds or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in kinds.values())


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    if not args:
        return dict(kwargs)
    names = [
        name for name, each in signature_of(model.forward).parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(names):
        raise _refusal(f"arguments of {type(model).__name__} have no names: nothing says which one is its {_MASK}")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _facts_of(mask: torch.Tensor, labels: Any, positions: Any) -> list[Any]:
    """Return lengths of rows, and whether padding is elsewhere than at their ends, labels count it, and positions are others.

    A GPU is waited for once.
    """
    lengths = (mask != 0).sum(1)  # [b]
    expected = torch.arange(mask.shape[1], device=mask.device)  # [s]
    is_kept = expected < lengths[:, None]  # [b, s]
    no = torch.zeros((), dtype=torch.bool, device=mask.device)
    facts = [
        (mask != is_kept).any(),
        ((labels != _IGNORED) & ~is_kept).any() if _has_shape(labels, mask) else no,
        ((positions != expected) & is_kept).any() if isinstance(positions, torch.Tensor) else no,
    ]
    *counts, elsewhere, counted, others = torch.cat([lengths, torch.stack(facts).long()]).tolist()
    return [counts, elsewhere, counted, others]


def _has_shape(value: Any, mask: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == mask.shape
