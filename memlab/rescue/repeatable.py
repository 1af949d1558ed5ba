"""One call of a model that can be made again: the first run, and runs from the state that it began with.

It runs on *aliases* of the parameters and on stand-ins for those of its arguments, and of the tensors it finds in the model's state, that have
a graph. So the graph of the model ends there, and is nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from memlab.rescue.found import Found, is_entering
from memlab.rescue.outputs import Path, at, differentiable, exchanged
from memlab.rescue.recovery import OtherResultsError
from memlab.rescue.start import Start, Weights
from memlab.runtime import graphs, hooks
from memlab.runtime.aliases import Aliases
from memlab.runtime.autocast import CallContext
from memlab.runtime.batch import Batch
from memlab.runtime.fingerprints import Fingerprint, are_others, fingerprints
from memlab.runtime.lazy import requires_grad
from memlab.runtime.model_state import KeptTensor, Place
from memlab.runtime.modules import ParameterHooks
from memlab.runtime.rng import RandomState
from memlab.runtime.tree import Lent

if TYPE_CHECKING:
    from memlab.rescue.calls import Calls

Run = Callable[..., Any]

_LOSSY = 0.1  # by how much outputs may be others under a plan that changes numbers, relative to their norm


class RepeatableCall:
    """One call of a model in training mode, and its graph."""

    def __init__(
        self,
        model: nn.Module,  # whose buffers and parameters it uses
        run: Run,  # the model's call through all techniques in force at the time it is made
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        aliases: Aliases,  # of the model's parameters; shared by the calls of a session
        calls: Calls,  # knows of the plan, and what ran before
    ) -> None:
        self._model = model
        self._run = run
        self._given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = args, kwargs
        self._leaves, self._spec = tree_flatten((args, dict(kwargs)))
        self._aliases = aliases
        self._calls = calls
        self._inputs = [i for i, leaf in enumerate(self._leaves) if requires_grad(leaf)]
        self._places: list[Place] = []  # in the model's state, where outputs are
        self._context = CallContext()
        self._hooks_of_aliases = ParameterHooks(aliases.aliases)
        self._before = Start(model, aliases.device, [*self._leaves, *args, *kwargs.values()])
        self._found = Found(self._before.state, {id(leaf) for leaf in self._leaves})
        self._under_way = hooks.calls_under_way()
        self._after: RandomState | None = None
        self._watched = [*self._leaves, *aliases.originals]  # must be as they were, for another run
        self._versions = [*map(_version, self._watched)]
        self._graph: dict[Path, torch.Tensor] | None = None
        self._inner_inputs: list[torch.Tensor] = []
        self._paths: list[Path] = []
        self._output: Any = None
        self._gave: dict[Path, Fingerprint] = {}  # its first run
        self._gave_exactly = True  # whether that was under an exact plan
        # whether gradients of the first run go to a tensor that is no parameter, no argument that had one before, and not found
        self.has_other_leaves = False
        self.goes_on = False  # whether the first run has used a graph from before it that it was not seen to find
        self._retained: list[int] = []  # numbers of outputs that keep their gradients
        # whether its backward pass runs code that is neither torch's nor memlab's: hooks on tensors, autograd functions
        self._runs_code = False
        # id of the last error of the model or of autograd, which would keep alive what its frames hold
        self._theirs = 0

    @property
    def has_graph(self) -> bool:
        """Return whether the inner graph is there, and with it the activations of the model."""
        return self._graph is not None

    @property
    def rows(self) -> int:
        """Rows of the batch: the first dimension of the first tensor."""
        return Batch(tuple(self._leaves), {}).rows or 1

    @property
    def leaves_features(self) -> bool:
        """Return whether the call has left tensors with a graph beside what it returns."""
        return bool(self._places)

    @property
    def can_start_over(self) -> bool:
        """Return whether nothing has happened that cannot be undone."""
        return self._weights.are_untouched

    @property
    def can_run_again(self) -> bool:
        """Return whether its inputs and the weights are as they were before it, for another run."""
        return self._versions == [*map(_version, self._watched)]

    @property
    def unreadable(self) -> list[str]:
        """Return names of what the call may change and nothing can put back: it must not run twice."""
        return self._before.state.unreadable

    def start_over(self) -> None:
        """Restore the state that the call began with."""
        self._aliases.take_gradients()  # of a backward pass that the model runs itself
        self._hooks_of_aliases.take_away_others()
        self._before.begin_again()

    def is_own(self, error: BaseException) -> bool:
        """Return whether an error is memlab's own, and not one of the model or of autograd."""
        return id(error) != self._theirs and self._calls.rescuer.is_own(error)

    @contextmanager
    def _of_theirs(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._theirs = id(error)
            raise

    def drop_graph(self) -> None:
        """Let go of the graph; the backward pass will run the call again."""
        self._graph = None
        self._inner_inputs = []
        torch.clear_autocast_cache()

    # -- the first run -------------------------------------------------------------------------

    def _first_run(self) -> tuple[torch.Tensor, ...]:
        """Run the model and keep the graph; returns the values of what has one."""
        assert self._given is not None
        args, kwargs = self._given
        inner: dict[int, torch.Tensor] = {}

        def lent(leaf: Any) -> Any:
            if not requires_grad(leaf):
                return leaf
            if id(leaf) not in inner:
                inner[id(leaf)] = leaf.detach().requires_grad_()
            return inner[id(leaf)]

        began, is_alone = graphs.sequence_nr(), self._calls.is_alone
        hooks_before = RemovableHandle.next_id
        self._weights = Weights(self._model)
        found = self._found.stand_ins()
        if found:
            self._before.state.put_back(found)
        try:
            # the loop's own containers: what the model puts there is seen by the loop
            with self._inside(), Lent(lent, lambda leaf: leaf) as lending:
                args, kwargs = lending.lend(args), {name: lending.lend(each) for name, each in kwargs.items()}
                if inner.keys() != {id(self._leaves[position]) for position in self._inputs}:
                    # in objects that are no lists, dicts or tuples: copies of these
                    args, kwargs = tree_unflatten([lent(leaf) for leaf in self._leaves], self._spec)
                with self._of_theirs():
                    output = self._run(*args, **kwargs)
        except BaseException:
            self._give_back(self._own(inner, found))
            self.drop_graph()
            raise
        own = self._own(inner, found)
        left = self._give_back(own)
        self._given = None
        self._after = RandomState()
        self._before.call_ended()
        self._allow_own_writes()
        operators = graphs.sequence_nr() - began
        values = self._take_outputs(exchanged(output, own), left, own, began, is_alone=is_alone)
        assert self._graph is not None
        has_hooks = RemovableHandle.next_id != hooks_before
        self._runs_code = has_hooks or self._calls.runs_code(operators, self._graph.values())
        self._inner_inputs = [*(lent(self._leaves[position]) for position in self._inputs), *self._found.leaves]
        known = (*self._inner_inputs, *self._aliases.aliases)
        self.has_other_leaves = self._calls.has_other_leaves(operators, self._graph.values(), known)
        return values

    def _own(
        self, inner: Mapping[int, torch.Tensor], found: Mapping[KeptTensor, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return weights, arguments and tensors of the state, which are the loop's own, by `id` of what the model saw in their places."""
        arguments = {id(inner[id(leaf)]): leaf for leaf in self._leaves if id(leaf) in inner}
        pairs = zip(self._found.originals, found.values(), strict=True)
        # what is written to in place is another tensor from then on
        return self._aliases.own | arguments | {id(each): original for original, each in pairs if is_entering(each)}

    def _give_back(self, own: Mapping[int, torch.Tensor]) -> dict[Place, Any]:
        """Put the loop's own tensors back into the model's state; return what the call has put there."""
        before = self._before.state.news()
        now = {place: exchanged(value, own) for place, value in before.items()}
        self._before.state.put({place: value for place, value in now.items() if value is not before[place]})
        return now

    def _take_outputs(
        self, output: Any, left: Mapping[Place, Any], own: Mapping[int, torch.Tensor], began: int, *, is_alone: bool
    ) -> tuple[torch.Tensor, ...]:
        """Take over the graph of what the call returns and leaves in the model's state; returns the values.

        Args:
            output: what it returns.
            left: what it has put into the model's state.
            own: the loop's own tensors, which have no graph within.
            began: number of torch's operators when it began.
            is_alone: no operator before that has a graph that it can have used.
        """

        def is_made(tensor: torch.Tensor) -> bool:
            return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= began

        # the state may have got tensors of the loop's from elsewhere
        left = {place: value for place, value in left.items() if any(map(is_made, differentiable(value).values()))}
        self._places, self._output = [*left], [output, *left.values()]
        known = {id(each) for each in own.values()}
        tensors = {path: t for path, t in differentiable(self._output).items() if id(t) not in known}
        self._graph = {path: t for path, t in tensors.items() if path[0] == 0 or is_made(t)}
        self._paths = list(self._graph)
        self._gave, self._gave_exactly = fingerprints(self._graph), self._calls.are_exact
        self._retained = [number for number, each in enumerate(self._graph.values()) if each.retains_grad]
        nodes = set() if is_alone and not self._found.kept else graphs.nodes_of(self._graph.values())
        self.goes_on = any(node._sequence_nr() < began for node in nodes)
        self._found.forget_unused(nodes)
        return tuple(tensor.detach() for tensor in self._graph.values())

    def _allow_own_writes(self) -> None:
        """Put back what the call itself writes to its arguments before it is run again."""
        copied = self._before.copied_ids
        for position, leaf in enumerate(self._leaves):
            if id(leaf) in copied:
                self._versions[position] = _version(leaf)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self._aliases.in_place(), torch.enable_grad():
            yield

    # -- runs that follow ----------------------------------------------------------------------

    def _run_again(self, wanted: Iterable[Path]) -> None:
        """Make the graph of the wanted outputs anew under the plan in force, as the first run made it."""
        leaves = list(self._leaves)
        for position in self._inputs:
            leaves[position] = leaves[position].detach().requires_grad_()
        made = self._again(leaves, self._found.stand_ins(), self._inside())
        self._require_same(made, wanted)
        self._graph = made
        self._inner_inputs = [*(leaves[position] for position in self._inputs), *self._found.leaves]

    def _require_same(self, made: Mapping[Path, torch.Tensor], wanted: Iterable[Path]) -> None:
        """Refuse gradients of a run that gives other values than the first. Raises `OtherResultsError`: it does."""
        draws = self._after is None or not self._before.random.equals(self._after)
        gave = {path: self._gave[path] for path in wanted if path in self._gave}
        if draws:  # a loss that the model computes may be of other random numbers
            gave = {path: each for path, each in gave.items() if not each.is_number}
        if are_others(gave, made, 0.0 if self._gave_exactly and self._calls.are_exact else _LOSSY):
            raise OtherResultsError(type(self._model).__name__)

    def _again(
        self,
        leaves: Sequence[Any],
        found: dict[KeptTensor, torch.Tensor],
        inside: AbstractContextManager[None] | None = None,
    ) -> dict[Path, torch.Tensor]:
        """Run the model on other leaves, in containers of their own, from the state that the call began with; returns its outputs."""
        self._require_untouched()
        args, kwargs = tree_unflatten(leaves, self._spec)
        now = self._before.now()
        self._before.restore(found)
        gathered = self._aliases.take_gradients()
        try:
            with inside or nullcontext(), self._context.entered(), hooks.within(self._under_way):
                with self._of_theirs():
                    output = self._run(*args, **kwargs)
                news = self._before.state.news()
                return at([output, *(news.get(place) for place in self._places)], self._paths)
        finally:
            now.restore()
            self._aliases.give_gradients(gathered)  # in place of those of a backward pass that the model runs itself
            self._allow_own_writes()

    def _require_untouched(self) -> None:
        if not self.can_run_again:
            raise RuntimeError(
                "memlab cannot run this model call again: its inputs or the weights were changed in place between "
                "forward and backward"
            )


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
