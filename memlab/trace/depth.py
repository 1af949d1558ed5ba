"""Traces of a model with many like blocks, from traces of the same model with three of them.

Between the first blocks and the last, a pass does the same again and again. So the longest list of like blocks of the twin is
cut to three while a pass is traced, and what the second does forward, and the third and second do backward, is then put in
as often as the model has such blocks. Once for each setting four are traced as well.

That is exact where

1. the blocks from the second on are alike: in classes, attributes, shapes, and in what trains;
2. in the trace of four the third block does what the second does, and the pass back through it what that through the fourth does;
3. whatever is born in a repeated stretch ends as what is born in the others does;
4. both traces give the same, whatever the plan does: nothing else in it counts blocks, but notes do;
5. without a plan, so does the trace of the model as it is.

Elsewhere the whole model is traced.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from memlab.measuring.observation import BACKWARD, RECOMPUTE, RawEvent
from memlab.records import Category
from memlab.runtime.reach import MODULE_HOOKS
from memlab.runtime.stand_ins import stand_in
from memlab.runtime.workload import Workload
from memlab.trace.marks import Mark
from memlab.trace.recorder import Hidden, Priced, Recorder

if TYPE_CHECKING:
    from memlab.trace.tracer import Trace

KEPT, FEWER = 4, 3
_NUMBER = re.compile(r"(\d+)")
_PLAIN = (int, float, str, torch.dtype, torch.device)
_OF_MODULES = frozenset(vars(nn.Module()))


class Cursor(NamedTuple):
    """A place in a trace, by how much of each there is before it."""

    events: int
    priced: int
    hidden: int
    marks: int
    born: int


class Cut:
    """The longest list of like blocks of a model, which can be cut to a few."""

    def __init__(self, workload: Workload, container: nn.Module) -> None:
        self._container = container
        self.blocks = list(container.children())  # all of them
        self._groups = [group for optimizer in workload.optimizers for group in optimizer.param_groups]
        self._forward: list[Cursor] = []
        self._backward: list[Cursor] = []

    @contextmanager
    def made(self, kept: int) -> Iterator[None]:
        """Have the model with its first so many blocks, and its optimizers without the others."""
        modules, parameters = self._container._modules, [group["params"] for group in self._groups]
        self._container._modules = dict(itertools.islice(modules.items(), kept))
        gone = {id(p) for block in self.blocks[kept:] for p in block.parameters()}
        for group in self._groups:
            group["params"] = [p for p in group["params"] if id(p) not in gone]
        try:
            yield
        finally:
            self._container._modules = modules
            for group, before in zip(self._groups, parameters, strict=True):
                group["params"] = before

    @contextmanager
    def watched(self, recorder: Recorder, marks: Sequence[Mark]) -> Iterator[None]:
        """Note where in a pass each block begins, and where its first gradient is complete."""
        self._forward, self._backward = [], []

        def here() -> Cursor:
            events = recorder.events
            return Cursor(events, len(recorder.priced), len(recorder.hidden), len(marks), recorder.born)

        with ExitStack() as undo:
            for block in self.blocks[:KEPT]:
                _note_call(block, here, self._forward, undo)
            for block in self.blocks[1:KEPT]:
                first = next(p for p in block.parameters() if p.requires_grad)
                note = first.register_post_accumulate_grad_hook(lambda _: self._backward.append(here()))  # type: ignore[no-untyped-call]
                undo.callback(note.remove)
            yield

    def repeated(self, recorder: Recorder) -> Repeated:
        """What was noted in the last pass."""
        tensors = [*self.blocks[1].parameters(), *self.blocks[1].buffers()]
        numbers = dict.fromkeys(recorder.numbers_of(tensors))
        return Repeated(self._forward, self._backward, [*numbers])


@dataclass(frozen=True)
class Repeated:
    """The blocks of a model in a trace of it with four or three."""

    forward: list[Cursor]  # where each begins
    backward: list[Cursor]  # where a gradient of each but the first is complete, from the last on
    parameters: list[int]  # numbers of the storages of one's parameters and buffers


def _note_call(block: nn.Module, here: Callable[[], Cursor], places: list[Cursor], undo: ExitStack) -> None:
    original: Callable[..., Any] = block.forward
    is_first = True

    def noted(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            places.append(here())
        return original(*args, **kwargs)

    stand_in(block, "forward", noted, undo)


def cut_of(workload: Workload) -> Cut | None:
    """The cut of a model; None where it has no list of more than four blocks that are alike and train."""
    lists = [each for each in workload.model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    longest = max(lists, key=lambda each: len(each), default=None)
    if longest is None or len(longest) <= KEPT or not _are_alike(list(longest)):
        return None
    return Cut(workload, longest)


def _are_alike(blocks: Sequence[nn.Module]) -> bool:
    own = [{id(p) for p in block.parameters()} for block in blocks]
    if len(set().union(*own)) < sum(map(len, own)) or not any(p.requires_grad for p in blocks[1].parameters()):
        return False
    first, *others = ([*block.named_modules()] for block in blocks[1:])
    return all(
        len(first) == len(other) and all(_is_like(*pair, at) for pair in zip(first, other, strict=True))
        for at, other in enumerate(others, 1)
    )


def _is_like(one: tuple[str, nn.Module], other: tuple[str, nn.Module], distance: int) -> bool:
    """Return whether two parts of blocks do the same, but for what tells their blocks' places in the list."""
    mine, theirs = (
        {key: value for key, value in vars(each).items() if key not in _OF_MODULES} for _, each in (one, other)
    )
    has_hooks = any(getattr(each, hooks) for _, each in (one, other) for hooks in MODULE_HOOKS)
    return not has_hooks and _laid_out(*one) == _laid_out(*other) and _are_equal(mine, theirs, distance)


def _laid_out(name: str, module: nn.Module) -> Any:
    tensors = [*module._parameters.items(), *module._buffers.items()]
    laid_out = [(key, t if t is None else (t.shape, t.stride(), t.dtype, t.requires_grad)) for key, t in tensors]
    return name, type(module), module.training, laid_out


def _are_equal(one: Any, other: Any, distance: int) -> bool:
    """Return whether attributes are equal; of numbers, whether they are so or tell a place in the list."""
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        one, other = ((each.func, each.args, each.keywords) for each in (one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key], distance) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_are_equal(a, b, distance) for a, b in zip(one, other, strict=True))
    return one is other or (isinstance(one, _PLAIN) and one == other) or (type(one) is int and other == one + distance)


# a rule of numbers in a copy of a stretch: above which number so much is added, and above which higher one so much instead
_Rule = tuple[float, int, float, int]


def _moved(number: int, rule: _Rule) -> int:
    low, added, high, added_above = rule
    return number + (added_above if number > high else added if number > low else 0)


def deepened(trace: Trace, blocks: Repeated, more: int) -> Trace | None:
    """The trace of a model with so many blocks more, or less, from one of it with four or three; None where it does not follow."""
    kept = len(blocks.forward)
    if kept not in (KEPT, FEWER) or len(blocks.backward) != kept - 1 or trace.observation.owners:
        return None
    same = _with_more(trace, blocks, 0)
    return _with_more(trace, blocks, more) if same is not None and are_same(same, trace) else None


def _with_more(trace: Trace, blocks: Repeated, more: int) -> Trace | None:
    # of four blocks the third is like the second; of three, the last begins where the second ends
    (one, two, three, *_), (last, before, *_) = blocks.forward, blocks.backward
    final, next_to, is_three = blocks.forward[-1], blocks.backward[-1], len(blocks.forward) == FEWER
    if not one.born <= two.born <= three.born <= final.born <= last.born <= before.born <= next_to.born:
        return None
    seen, raw = trace.observation, trace.observation.raw
    # the last storage that was born before the backward pass
    turn = (
        min((number for _, size, number, moment in raw if size > 0 and moment in (BACKWARD, RECOMPUTE)), default=0) - 1
    )
    forward, backward = three.born - two.born, before.born - last.born
    begin, end = Cursor(0, 0, 0, 0, 0), Cursor(len(raw), len(trace.priced), len(trace.hidden), len(trace.marks), 0)
    copies = range(more + len(blocks.forward) - 2)  # all blocks but the first and the last
    stretches: list[tuple[Cursor, Cursor, _Rule]] = [
        (begin, two, (math.inf, 0, math.inf, 0)),
        *((two, three, (one.born, copy * forward, math.inf, 0)) for copy in copies),
        (final, last, (two.born, more * forward, math.inf, 0)),
        *(
            (last, before, (one.born, (more - copy) * forward, turn, more * forward + copy * backward))
            for copy in copies
        ),
        (next_to, end, (final.born, more * forward, last.born, more * (forward + backward))),
    ]

    def born_again(number: int) -> list[int]:
        """Numbers of all that this storage stands for; none for one of a block that another stands for."""
        if two.born < number <= three.born:
            return [number + copy * forward for copy in copies]
        if last.born < number <= before.born:
            return [number + more * forward + copy * backward for copy in copies]
        if three.born < number <= final.born or before.born < number <= next_to.born:
            return []
        return [number + more * ((number > final.born) * forward + (number > last.born) * backward)]

    events: list[RawEvent] = []
    priced: list[Priced] = []
    hidden: list[Hidden] = []
    marks: list[Mark] = []
    for start, stop, rule in stretches:
        own = raw[start.events : stop.events]
        # what ends for all blocks at once, as casts of weights do where autocast ends
        ended = {number for _, size, number, _ in own if size < 0} if start in (final, next_to) else ()
        # up to there the next block is looked at, beyond it the one before; of three blocks there is one on one side alone
        middles = (two if is_three and start is final else three, last if is_three else before)
        of_all = {
            number
            for first, middle, past, length in zip(
                (two, last), middles, (final, next_to), (forward, backward), strict=True
            )
            for number in ended
            if first.born < number <= past.born
            and (number + length if number <= middle.born else number - length) in ended
        }
        at: Sequence[int] = range(len(events), len(events) + len(own) + 1)  # new places of events
        if of_all:
            at = [len(events)]
            for seconds, size, number, moment in own:
                numbers = born_again(number) if number in of_all else [_moved(number, rule)]
                events += [(seconds, size, new, moment) for new in numbers]
                at.append(len(events))
        else:
            events += [(seconds, size, _moved(number, rule), moment) for seconds, size, number, moment in own]
        done = trace.priced[start.priced : stop.priced]
        priced += [Priced(at[each.event - start.events], each.work, each.moment) for each in done]
        for inside in trace.hidden[start.hidden : stop.hidden]:
            begin_at, event_at = (at[event - start.events] for event in (inside.begin, inside.event))
            hidden.append(Hidden(begin_at, event_at, inside.inside, inside.moment))
        marks += [
            replace(mark, event=at[mark.event - start.events], storage=_moved(mark.storage, rule))
            for mark in trace.marks[start.marks : stop.marks]
        ]

    unused = itertools.count(max(itertools.chain(seen.baseline, (e[2] for e in events)), default=0) + 1)
    put_in = {next(unused): seen.baseline[number] for _ in range(more) for number in blocks.parameters}
    gone = blocks.parameters if more < 0 else ()
    baseline = {number: size for number, size in seen.baseline.items() if number not in gone} | put_in
    assigned = {new: category for number, category in seen.assigned.items() for new in born_again(number)}
    peak_bytes = _peak_bytes(baseline, events, hidden)
    if not _end_alike(baseline, events, (two.born, forward, last.born + more * forward, backward), len(copies)):
        return None
    observation = replace(
        seen,
        peak_bytes=peak_bytes,
        baseline=baseline,
        raw=tuple(events),
        assigned={**assigned, **dict.fromkeys(put_in, Category.PARAMETERS)},
    )
    # what a block's forward pass sends off the device stays there until its backward pass
    host_bytes = sum(each.work.host_bytes for each in trace.priced[two.priced : three.priced])
    return replace(
        trace,
        observation=observation,
        host_bytes=trace.host_bytes + more * round(host_bytes),
        priced=tuple(priced),
        hidden=tuple(hidden),
        outputs=tuple(_repeated(trace.outputs, born_again)),
        products={key: number for key, old in trace.products.items() for number in born_again(old)[:1]},
        marks=tuple(marks),
    )


def _repeated(numbers: Iterable[int], born_again: Callable[[int], list[int]]) -> Iterator[int]:
    """Numbers of storages in order, those of each repeated block one after another."""
    for length, run in itertools.groupby(map(born_again, numbers), len):
        yield from itertools.chain.from_iterable(zip(*run, strict=True)) if length else ()


def _peak_bytes(baseline: Mapping[int, int], events: Iterable[RawEvent], hidden: Iterable[Hidden]) -> int:
    levels = [*itertools.accumulate((event[1] for event in events), initial=sum(baseline.values()))]
    inside = (levels[each.event] + size_bytes for each in hidden for _, size_bytes in each.peaks())
    return max(*levels, *inside)


def _end_alike(
    baseline: Mapping[int, int], events: Iterable[RawEvent], born: tuple[int, int, int, int], copies: int
) -> bool:
    """Return whether all copies of a storage live in the end, or none, and nothing ends twice."""
    live = dict(baseline)
    for _, size_bytes, number, _ in events:
        live[number] = live.get(number, 0) + size_bytes
        if live[number] < 0:
            return False
    for first, length in zip(born[::2], born[1::2], strict=True):
        for number in range(first + 1, first + 1 + length):
            if len({bool(live.get(number + copy * length)) for copy in range(copies)}) > 1:
                return False
    return True


def notes_of_more(three: Sequence[str], four: Sequence[str], more: int) -> tuple[str, ...] | None:
    """The notes on a model with so many blocks more than four, of which some count blocks; None where it is not numbers that differ."""
    parts = [[_NUMBER.split(note) for note in notes] for notes in (three, four)]  # words and numbers in turn
    if [each[::2] for each in parts[0]] != [each[::2] for each in parts[1]]:
        return None
    for fewer, note in zip(*parts, strict=True):
        note[1::2] = [
            n if before == n else str(int(n) + more * (int(n) - int(before)))
            for before, n in zip(fewer[1::2], note[1::2], strict=True)
        ]
    return tuple(map("".join, parts[1]))


def are_same(one: Trace, other: Trace) -> bool:
    """Return whether two traces are the same but for the numbers of storages and the clock."""
    return bool(_compared(one) == _compared(other))


def _compared(trace: Trace) -> Any:
    seen = trace.observation
    names: dict[int, int] = {}
    events = [(size > 0, size, names.setdefault(number, len(names)), moment) for _, size, number, moment in seen.raw]
    # deaths between two births come in any order: that of addresses, where autocast drops its casts
    runs = [
        sorted(run) if not is_birth else [*run] for is_birth, run in itertools.groupby(events, lambda each: each[0])
    ]
    named = {names[number]: category for number, category in seen.assigned.items() if number in names}
    outputs = [names.get(number) for number in trace.outputs]
    products = {key: names.get(number) for key, number in trace.products.items()}
    settled = {names.get(number): (event, number in trace.copied) for number, event in trace.settled.items()}
    ends = (seen.baseline_bytes, trace.host_bytes, trace.samples, trace.tokens, trace.notes)
    return runs, named, outputs, products, settled, trace.priced, trace.hidden, trace.is_decided, ends
