"""The first training call of a model, in which it is measured what every module's graph keeps.

Parts cut beforehand run twice in it: once with their graph, which tells what modules within them keep and is dropped, and
once more recomputed, which shows whether the second run gives what the first gave. So no more than one part is held at a time.
A part whose second run gives something else runs a third time, with the graph that counts, and is never recomputed. Where
a hook may have kept something of the first run, that one counts.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from memlab.runtime import graphs
from memlab.runtime.aliases import put_back, same_values
from memlab.runtime.dispatch import written_by
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.techniques.checkpointing.kept import made_by, storages
from memlab.techniques.checkpointing.rerun import Part, Run, WriteWatch
from memlab.techniques.checkpointing.segments import Node


class Look(WriteWatch):
    """Watches one call of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.root: Node | None = None  # the model's call, when it is over
        self._modules = {id(module) for module in model.modules()}
        self._open: list[tuple[Node, int, float]] = []  # with the births before it, and the cost
        self._born: list[weakref.ref[torch.UntypedStorage]] = []
        self._number: dict[int, int] = {}  # of a living storage, which no other one has
        self._same_as: dict[int, int] = {}  # the output of a second run is that of the first
        self._cost = 0.0
        self._muted = False

    @contextmanager
    def watching(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Context of the model's call."""
        before = register_module_forward_pre_hook(self._called)
        after = register_module_forward_hook(self._returned, with_kwargs=True)
        # the model's own hooks ran before: its call is opened here
        self._enter(model, (args, dict(kwargs)))
        try:
            with self:
                yield
                self._leave(())
        finally:
            before.remove()
            after.remove()
            # where torch forgets that the hook is gone
            nn.modules.module._global_forward_hooks_with_kwargs.pop(after.id, None)
            self._held.clear()
            self._protected.clear()

    def part_runs(
        self,
        part: Part,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        recomputed: Callable[[Run], Any],
    ) -> Any:
        """Run a part with its graph, and again by `recomputed`, which keeps none; returns what counts."""
        run = Run(part, args, kwargs)
        run.protect(self)
        run.protect_state(self)
        run.protect_weights(self)
        part.is_watched = True
        is_called = part.span is None and self._open[-1][0].module is part.owner
        if not is_called:
            self._enter(part.owner, (args, dict(kwargs)))
        node, births, cost = self._open[-1]
        held, given = run.state_tensors, Given((args, kwargs))
        output = run.first(call, args, kwargs)
        self._measure(node, births, output)
        node.cost = self._cost - cost
        if run.cannot_be_repeated or run.writes_to_inputs:
            counts = False  # the graphs of its inputs are no longer those it started from
        elif run.is_seen_inside:
            counts = False
            with torch.no_grad(), given.as_before():
                self._compared(part, run, output, lambda: call(*args, **kwargs))
        else:
            output = tree_map(_without_graph, output)
            numbers = [*self._sizes(output)]
            given.put_back()
            second: list[Any] = []

            def again() -> Any:
                second.append(recomputed(run))
                return second[0]

            counts = self._compared(part, run, output, again)
            if not counts:
                given.put_back()
                run.put_weights_back()
            output = second[0] if counts else self._once_more(run, lambda: call(*args, **kwargs))
            self._same_as |= dict(zip(self._sizes(output), numbers, strict=False))
        node.is_fixed, node.recomputed = bool(part.why_not_again), counts
        del held
        if part.span is not None:
            self._close_run()
        elif not is_called:
            self._leave(output)
        return output

    def _compared(self, part: Part, run: Run, first: Any, again: Callable[[], Any]) -> bool:
        is_same = self._gives(run, first, again)
        if not is_same:
            part.why_not_again = "computed something else when run again"
        return is_same

    def _gives(self, run: Run, first: Any, again: Callable[[], Any]) -> bool:
        """Return whether running a part once more gives what it gave; where it has a graph, its state then is what counts."""
        self._muted = True
        weights = run.weights_now()
        try:
            with run.again(with_graphs=True) as repetition:
                is_same = same(first, again())
                for weight, values in weights.items():
                    if not torch.equal(weight, values):
                        put_back(weight, values)
                        is_same = False
                repetition.counts = is_same and torch.is_grad_enabled()
                return is_same
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        finally:
            self._muted = False

    def _once_more(self, run: Run, call: Callable[[], Any]) -> Any:
        """Run with the graph, for a part that is not recomputed."""
        self._muted = True
        try:
            with run.again(with_graphs=True) as repetition:
                repetition.counts = True
                return call()
        finally:
            self._muted = False

    # -- calls -----------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: Any) -> None:
        if not self._muted and id(module) in self._modules and not graphs.is_transformed():
            self._enter(module, args)

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._muted or all(node.module is not module for node, _, _ in self._open[1:]):
            return
        while self._open[-1][0].module is not module:  # calls that raised, and whose errors the model caught
            self._open.pop()
        self._open[-1][0].inputs |= self._sizes((args, kwargs))
        self._leave(output)

    def _enter(self, module: nn.Module, given: Any) -> None:
        sizes = self._sizes(given)
        node = Node(module, inputs=sizes, input_key=next(iter(sizes), None))
        self._open.append((node, len(self._born), self._cost))

    def _leave(self, output: Any) -> None:
        node, births, cost = self._open.pop()
        if not node.recomputed:
            node.cost = self._cost - cost
            self._measure(node, births, output)
        passed_on = list(self._sizes(output))
        node.output_key = passed_on[0] if len(passed_on) == 1 else None
        if self._open:
            self._open[-1][0].children.append(node)
        else:
            self.root = node

    def _close_run(self) -> None:
        """Children that ran together are those of the Sequential; what they kept between them is its own."""
        together, _, _ = self._open.pop()
        parent = self._open[-1][0]
        if together.recomputed:
            parent.hidden += together.own_bytes - sum(child.own_bytes for child in together.children)
            for child in together.children:
                child.recomputed = True
        for child in together.children:
            child.is_fixed = child.is_fixed or together.is_fixed
        if together.children:
            together.children[0].writes = together.children[0].writes or together.writes
        parent.alive |= together.alive
        parent.children += together.children

    def _measure(self, node: Node, births: int, output: Any) -> None:
        passed_on = {*node.inputs, *self._sizes(output)}
        living = ((self._same_as.get(number, number), ref()) for number, ref in enumerate(self._born[births:], births))
        sizes = {number: storage.nbytes() for number, storage in living if storage is not None}
        node.own_bytes = sum(size for number, size in sizes.items() if number not in passed_on)
        came_in = {child.input_key for child in node.children}
        node.alive |= {number: size for number, size in sizes.items() if number in came_in}

    # -- storages ----------------------------------------------------------------------------------

    def _sizes(self, values: Any) -> dict[int, int]:
        """Bytes of the storages of some tensors, by number; parameters are kept by the model."""
        leaves = [leaf for leaf in tree_leaves(values) if not isinstance(leaf, nn.Parameter)]
        return {self._number_of(key): storage.nbytes() for key, storage in storages(leaves).items()}

    def _number_of(self, key: int) -> int:
        number = self._number.setdefault(key, -len(self._number) - 1)
        return self._same_as.get(number, number)

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().watched(func, args, kwargs)
        if not self._muted:
            for tensor in written_by(func, args, kwargs):
                number = self._number_of(storage_of(tensor))
                for node, _, _ in self._open:
                    node.writes = node.writes or number in node.inputs
        made, cost = made_by(func, args, kwargs, result)
        for key, storage in made.items():
            self._number[key] = len(self._born)
            self._born.append(weakref.ref(storage))
        self._cost += cost
        return result


class Given:
    """Contents of the lists and dictionaries among the arguments of a call, before it."""

    def __init__(self, values: Any) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._look_at(values)

    def _look_at(self, value: Any) -> None:
        if isinstance(value, (list, deque, dict)) and all(value is not known for known, _ in self._contents):
            self._contents.append((value, copy.copy(value)))
        if isinstance(value, (list, tuple, deque, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                self._look_at(item)

    def put_back(self) -> None:
        """Put the contents back."""
        for container, before in self._contents:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(before)

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Context in which they have these contents; afterwards they have those of now again."""
        now = Given([container for container, _ in self._contents])
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def same(first: Any, second: Any) -> bool:
    """Return whether two runs gave the same, bit for bit."""
    ones, others = tree_leaves(first), tree_leaves(second)
    return len(ones) == len(others) and all(_same(a, b) for a, b in zip(ones, others, strict=True))


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    if isinstance(one, FakeTensor) or one.layout is not torch.strided:
        return one.shape == other.shape and one.dtype is other.dtype
    with torch.no_grad():
        return same_values(one, other)
