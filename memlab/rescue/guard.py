"""A model call whose graph belongs to memlab, so that it can be dropped and made again.

Numbered rules of the mechanism:

1. The call runs inside one autograd function, on *aliases* of the parameters. What the loop gets has the
   values the model returned; behind it the loop's graph ends at one node, and the graph of the model is held
   by the `GuardedCall` alone.
2. The backward pass of that node differentiates the inner graph. When memory runs out there, the autograd
   engine that runs the loop's own graph notices nothing: the inner graph is dropped, the call is run again
   under another plan, from the state it began with (`model_state`), and differentiated with the gradients the
   loop has sent. Where such a pass runs code of the user's (hooks, autograd functions), what that has changed is put back first.
3. Gradients gather on the aliases and are handed to the parameters at the end, so a backward pass that
   breaks off has changed nothing; hooks of the user's (and of DDP) fire once, on the whole gradient.
4. Tensors with a graph that the call leaves in the model's state (activations that a hook has kept) are outputs as well, and those it
   finds there are inputs: one backward pass goes through the inner graph, so that hooks within see whole gradients. What
   reaches a parameter past the node all the same, from where `reach` does not look, gathers on the aliases
   too; `Aliases` that are left with a gradient are delivered when the loop's backward pass is over. A call that has used a graph from
   there (`torch.nn.utils.parametrize.cached`) is made again as the loop wrote it.
5. ``create_graph=True`` runs the model once more on the parameters themselves, as the gradient needs a graph; and again where memory
   runs out in that.
   ``retain_graph=True`` keeps the inner graph as it keeps the outer.
6. Outputs are siblings behind the node, though one may be computed from another (a mapped latent and its image). Who asks for
   the gradient of the former is answered by a hook within: `GuardedCall.hook`. Techniques may have made them siblings there as well,
   and refuse the hook then; so of a call under techniques no output is taken for one that none is computed from.
7. What fails here and is neither the model's error nor autograd's is memlab's own. The guard steps aside then, and the inner graph
   is differentiated as it is, or made once more.

Known limitations: files that a forward writes, and objects it reaches in ways `reach` does not know, are written again when the
call is repeated; ``torch.autograd.grad`` from tensors that a hook has kept inside the model does not find the parameters; under
rule 5 second derivatives come to a tensor within the model in two parts, which a hook that is not linear tells from one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memlab.rescue.outputs import Path, replaced
from memlab.rescue.repeatable import RepeatableCall, Run
from memlab.rescue.start import Start
from memlab.runtime import graphs
from memlab.runtime.aliases import Aliases
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.lazy import real
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.reach import has_backward_hooks

if TYPE_CHECKING:
    from memlab.rescue.calls import Calls

_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access "
    "saved tensors after calling backward."
)


class GuardedCall(RepeatableCall):
    """One call of a model in training mode, of which the loop's graph has one node."""

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        aliases: Aliases,
        calls: Calls,  # those of its session
    ) -> None:
        super().__init__(model, run, args, kwargs, aliases, calls)
        self._rest: _Rest | None = None
        self._hooks: dict[Path, OrderedDict[int, Callable[..., Any]]] = {}
        self.node: Callable[[], _Node | None] = lambda: None  # what the loop's graph has of it
        self._past: list[torch.Tensor | None] = []  # gradients that came past the node in the backward pass under way
        self._backward_began: Start | None = None  # where that runs code

    @property
    def weight(self) -> torch.Tensor:
        """A parameter that trains."""
        return next(each for each in self._aliases.originals if each.requires_grad)

    def outputs(self) -> Any:
        """Run the call and return what the model returns, attached to the loop's graph by one node.

        Raises:
            Whatever the model raises; nothing is kept then, and the state is to be restored by `start_over`.
        """
        began = graphs.sequence_nr()
        with deferred_interrupts():
            values = self._first_run()
        whole = [*(self._leaves[i] for i in self._inputs), *self._found.originals]
        values = _Guarded.apply(self, values, *whole, *self._aliases.originals)  # type: ignore[no-untyped-call]
        if values and values[0].grad_fn is not None:
            values[0].grad_fn._set_sequence_nr(began)  # what comes in past the node is to come first
        made, self._output = self._output, None
        output, *left = replaced(made, dict(zip(self._paths, values or (), strict=True)))
        self._before.state.put(dict(zip(self._places, left, strict=True)))
        for number in self._retained:
            self.retain(number, values[number])
        return output

    def drop_graph(self) -> None:
        super().drop_graph()
        self._rest = None  # outputs that the loss does not come from hold the same activations

    def close(self) -> None:
        """Let the loop's graph go of the call, whose gradients are handed over: a loss that is kept keeps no more."""
        node = self.node()
        if node is not None:
            node.call, node.rest = None, self._rest

    def leads_to_others(self, number: int) -> bool:
        """Return whether other outputs of the call are, or may be, computed from one of them."""
        if self._graph is None or self._calls.rescuer.session.techniques:
            return len(self._paths) > 1
        return any(self._paths[number] in others for others in graphs.before(_edges(self._graph)).values())

    def hook(self, number: int, hook: Callable[..., Any], *, by: str = "register_hook") -> RemovableHandle:
        """Have a function called with the whole gradient of an output, what comes through other outputs included; `by` is how the loop asks."""
        table = self._hooks.setdefault(self._paths[number], OrderedDict())
        handle = RemovableHandle(table)
        table[handle.id] = graphs.Asking(hook, by)
        return handle

    def retain(self, number: int, tensor: torch.Tensor) -> None:
        """Have an output keep its whole gradient."""
        tensor.retain_grad()
        seen = weakref.ref(tensor)

        def keep(gradient: torch.Tensor | None) -> None:
            if (there := seen()) is not None and gradient is not None:
                there.grad = gradient.clone()  # in place of what torch has kept, which came past the call

        self.hook(number, keep, by="retain_grad")

    @contextmanager
    def _hooked(self, outputs: Mapping[Path, torch.Tensor]) -> Iterator[None]:
        handles = [
            real(outputs[path]).register_hook(hook) for path, table in self._hooks.items() for hook in table.values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # -- backward ------------------------------------------------------------------------------

    def gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs and of the parameters, from those of the outputs."""
        self._past = self._aliases.take_gradients()  # of this pass, and no attempt's: nodes within come before this one
        try:
            inputs = self._gradients(self._wanted(outer))
        except Exception as error:
            if not (self._calls.rescuer.is_attached and self.is_own(error)):
                raise
            self._aliases.take_gradients()
            self._calls.rescuer.steps_aside(error)
            inputs = self._differentiate(self._wanted(outer), keep=False, retain=True)
        past, self._past = self._past, []
        return (*inputs, *map(_sum, past, self._aliases.take_gradients()))

    def _wanted(self, outer: Sequence[torch.Tensor | None]) -> dict[Path, torch.Tensor]:
        return {path: g for path, g in zip(self._paths, outer, strict=True) if g is not None}

    def _gradients(self, wanted: Mapping[Path, torch.Tensor]) -> list[torch.Tensor | None]:
        """Return gradients of the inputs; those of the parameters gather."""
        self._calls.backward_begins()
        keep = self._calls.keeps_graph()
        self._backward_began = None
        while True:
            oom: BaseException | None = None
            try:
                if self._backward_began is None and (self._runs_code or has_backward_hooks(self._model)):
                    self._backward_began = self._before.now()
                # who comes in past the node may do so again, should the whole pass be repeated
                retain = keep or any(gradient is not None for gradient in self._past)
                inputs = self._differentiate(wanted, keep=keep, retain=retain)
            except BaseException as error:
                if not self._calls.rescuer.is_attached:
                    raise
                if is_out_of_memory(error) and not self.can_run_again:
                    self._calls.note_changed()
                    raise
                self._break_off()
                oom = self._calls.rescuer.recovery.as_refusal(error)
                if not self._calls.rescuer.recovery.can_rescue(oom):
                    is_back = self._calls.rescuer.recovery.falls_back(oom)
                    oom = None  # a name would keep it, and what its frames hold, in a cycle
                    if not is_back:
                        raise
            else:
                if self._backward_began is not None:
                    self._backward_began.call_ended()
                if not keep:
                    self._calls.is_done(self)
                return inputs
            self.undo_backward()
            if oom is not None:
                self._calls.makes_room(oom, self, keeps_rows=self._keeps_rows(wanted))

    def undo_backward(self) -> None:
        """Put back what code has changed in a backward pass that is to be repeated."""
        if self._backward_began is not None:
            self._backward_began.restore()

    def _differentiate(
        self, wanted: Mapping[Path, torch.Tensor], *, keep: bool, retain: bool
    ) -> list[torch.Tensor | None]:
        if self._graph is None:
            self._run_again(wanted)
        assert self._graph is not None
        hooked = self._hooked(self._graph) if self._hooks else nullcontext()
        edges = _edges(self._graph)  # the outputs themselves may go, as they do where the loop has let go of them
        inputs = self._inner_inputs
        if not keep:
            unused = {path: edge for path, edge in edges.items() if path not in wanted}
            self._rest = _Rest(self._paths, unused, inputs, self._aliases) if unused else None
            self._graph = None
        with self._aliases.in_place(), hooked, self._of_theirs():
            torch.autograd.backward([edges[path] for path in wanted], list(wanted.values()), retain_graph=retain)
        return _taken(inputs)

    def _batched(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Return gradients of several backward passes, which gather on no tensor."""
        wanted = self._wanted(outer)
        if self._graph is None:
            self._run_again(wanted)
        assert self._graph is not None
        edges = _edges(self._graph)
        sources = [*self._inner_inputs, *self._aliases.aliases]
        trained = [each for each in sources if each.requires_grad]
        keep = self._calls.keeps_graph()
        with self._aliases.in_place():
            found = iter(
                torch.autograd.grad(
                    [edges[path] for path in wanted], trained, [*wanted.values()], retain_graph=keep, allow_unused=True
                )
            )
        if not keep:
            self._graph = None
            self._calls.is_done(self)
        return tuple(next(found) if each.requires_grad else None for each in sources)

    def _break_off(self) -> None:
        self.drop_graph()
        self._aliases.take_gradients()

    def _keeps_rows(self, wanted: Mapping[Path, torch.Tensor]) -> bool:
        """Return whether a repetition must draw the same random numbers, and so cannot split the batch.

        The loop has computed its own loss from outputs that were made with them. A loss that the model computes is
        as good with others.
        """
        only_scalars = all(gradient.numel() == 1 for gradient in wanted.values())
        return not only_scalars and (self._after is None or not self._before.random.equals(self._after))

    def other_gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients that are to be differentiated again (as autograd has it under create_graph), or of several passes at once."""
        work = self._differentiable if torch.is_grad_enabled() else self._batched
        while True:
            oom: BaseException | None = None
            try:
                return work(outer)
            except BaseException as error:
                self.drop_graph()
                if self._calls.rescuer.recovery.can_rescue(error) and self.can_run_again:
                    oom = error
                elif not self._calls.rescuer.recovery.falls_back(error):
                    raise
            if oom is not None:
                self._calls.makes_room(oom, self, keeps_rows=self._keeps_rows(self._wanted(outer)))

    def _differentiable(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The model runs once more, on the parameters themselves."""
        parameters: list[torch.Tensor] = [*self._aliases.originals]

        @contextmanager
        def inside() -> Iterator[None]:
            """Have the model see views of its parameters, which have no way to inputs that were computed with the same parameters."""
            with self._aliases.originals_in_place() as parameters[:]:
                yield

        leaves = list(self._leaves)
        inputs = [leaves[position] for position in self._inputs]
        own = {
            id(each) for each in parameters if each.device in {leaf.device for leaf in inputs}
        }  # no view of one on the host
        is_computed = any(id(leaf) in own for leaf in graphs.leaves_of(inputs))
        # views, whose gradients are not handed to hooks of the loop's tensors
        for position in self._inputs:
            leaves[position] = leaves[position].view_as(leaves[position])
        found = self._found.views()
        made = self._again(leaves, found, inside() if is_computed else None)
        wanted = self._wanted(outer)
        self._require_same(made, wanted)
        sources = [*(leaves[i] for i in self._inputs), *found.values(), *parameters]
        with self._hooked(made):
            return torch.autograd.grad(
                [real(made[path]) for path in wanted], sources, [*wanted.values()], create_graph=True, allow_unused=True
            )


@dataclass(frozen=True, eq=False)
class _Rest:
    """Rest of a call of which a backward pass has used some outputs: the graph of the others.

    It may share nothing with what was used, as two heads on an input do. Whether it does, torch says by itself.
    """

    paths: list[Path]
    edges: Mapping[Path, Any]
    inputs: list[torch.Tensor]
    aliases: Aliases

    def gradients(self, outer: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs and of the parameters, from those of the outputs."""
        wanted = {path: g for path, g in zip(self.paths, outer, strict=True) if g is not None}
        if not self.edges.keys() >= wanted.keys():
            raise RuntimeError(_TWICE)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        with self.aliases.in_place():
            torch.autograd.backward([self.edges[path] for path in wanted], list(wanted.values()), retain_graph=keep)
        return (*_taken(self.inputs), *self.aliases.take_gradients())


def _edges(tensors: Mapping[Path, torch.Tensor]) -> dict[Path, Any]:
    return {path: torch.autograd.graph.get_gradient_edge(real(tensor)) for path, tensor in tensors.items()}


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other


def _taken(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of some leaves, which have none any more."""
    gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def is_guarded(node: Any) -> bool:
    """Return whether a node of the autograd graph is a guarded call."""
    return isinstance(node, _Guarded._backward_cls)


def before_others(tensor: torch.Tensor) -> tuple[GuardedCall, int] | None:
    """Return the call and number of an output that others of its call are computed from; None for any other tensor."""
    node: Any = tensor.grad_fn
    call: GuardedCall | None = node.node.call if is_guarded(node) else None
    return (call, tensor.output_nr) if call is not None and call.leads_to_others(tensor.output_nr) else None


class _Node:
    """Holds a guarded call for the loop's graph, until it is done."""

    __slots__ = ("__weakref__", "call", "rest")

    def __init__(self, call: GuardedCall) -> None:
        self.call: GuardedCall | None = call
        self.rest: _Rest | None = None
        call.node = weakref.ref(self)


class _Guarded(torch.autograd.Function):
    """The loop's view of a guarded call: inputs and parameters in, outputs out."""

    @staticmethod
    def forward(
        ctx: Any, call: GuardedCall, values: tuple[torch.Tensor, ...], *_tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.node = _Node(call)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, rest = ctx.node.call, ctx.node.rest
        with deferred_interrupts():
            if call is None and rest is not None:
                return (None, None, *rest.gradients(gradients))
            if call is None:
                raise RuntimeError(_TWICE)
            if torch.is_grad_enabled() or graphs.are_batched(gradients):
                return (None, None, *call.other_gradients(gradients))
            return (None, None, *call.gradients(gradients))
