"""One run of a part of a model that keeps no graph and is run again in the backward pass, as the first time.

The recomputation itself is that of `torch.utils.checkpoint` (use_reentrant=False). What is added: the part starts again
from the `state` it started from, hooks that only look on are left out, and tensors among its arguments that it writes to are
copied. Which ones it writes to is watched in its first run (`WriteWatch`), where a copy is made right before the write.
"""

from __future__ import annotations

import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from memlab.errors import RefusalError
from memlab.runtime import hooks
from memlab.runtime.aliases import put_back
from memlab.runtime.autocast import CallSettings
from memlab.runtime.dispatch import StorageWatch, defers
from memlab.runtime.dropped_graphs import held_by_graph
from memlab.runtime.graphs import is_within_checkpoint
from memlab.runtime.interrupts import deferred_interrupts, interruptible
from memlab.runtime.lifetimes import is_shared, storage_of
from memlab.runtime.model_state import KeptTensor, Repetition, State, Written
from memlab.techniques.checkpointing.part_hooks import PartHooks
from memlab.techniques.checkpointing.recomputation import RecomputationCheck, contexts
from memlab.techniques.checkpointing.selective import Products

_running = threading.local()


def is_within_another() -> bool:
    """Return whether this thread runs a part, or what the model checkpoints itself: parts within are none of their own."""
    return is_within_checkpoint() or bool(getattr(_running, "depth", 0))


@dataclass(eq=False)
class Part:
    """A part of a model that can be run again: a module, or consecutive children of an `nn.Sequential`."""

    owner: nn.Module  # the module whose forward is replaced
    name: str  # of the part, for people
    span: tuple[int, int] | None = None  # first child, and the one after the last; None for the module itself
    written: Written = field(default_factory=Written)  # tensors of its state that it writes to
    written_inputs: set[int] = field(default_factory=set)  # places of tensors among its arguments that it writes to
    hooks_that_take_part: set[int] = field(default_factory=set)  # numbers of those that did in their last run
    is_watched: bool = False  # whether its first run is over, in which that is seen
    runs: int = 0
    why_not_again: str = ""  # why it is not recomputed, in words that follow its name

    @property
    def members(self) -> list[nn.Module]:
        """The module, or the children."""
        if self.span is None:
            return [self.owner]
        children = list(self.owner._modules.values())[slice(*self.span)]
        return [child for child in children if child is not None]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules within it, each once."""
        return list(dict.fromkeys(module for member in self.members for module in member.modules()))

    @property
    def hooked(self) -> list[nn.Module]:
        """Modules whose hooks run within it; those of the owner run around it."""
        return [module for module in self.modules if module is not self.owner]


class Run:
    """One run of a part."""

    def __init__(self, part: Part, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves, self._spec = tree_flatten((args, dict(kwargs)))
        self._part = part
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._require_grad = {place for place in self._places if leaves[place].requires_grad}
        self.inputs: list[torch.Tensor] = [leaves[place] for place in self._places]
        # modules tell by identity that they are given one tensor several times (self-attention)
        self._first_with = {place: min(p for p in self._places if leaves[p] is leaves[place]) for place in self._places}
        self._others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._copies: dict[int, torch.Tensor] = {}
        self._weights: dict[nn.Parameter, torch.Tensor] = {}  # that train and were written to, with what they were
        modules = part.modules
        self.device = _device(self.inputs, modules)
        self._state = State(modules, self._others, part.written, self.device, frozen=not part.is_watched)
        self._observers = PartHooks(part.hooked, part.hooks_that_take_part)
        self.under_way = hooks.calls_under_way()
        self.settings = CallSettings()
        held_by_graph(self._state, self._others, self.settings.variables)

    @property
    def cannot_be_repeated(self) -> bool:
        """Return whether the part has state that cannot be put back; it is never recomputed then."""
        if self._state.unreadable:
            self._part.why_not_again = f"reads {self._state.unreadable[0].lstrip('.')}, which cannot be put back"
        return bool(self._state.unreadable)

    @property
    def writes_to_inputs(self) -> bool:
        """Return whether the part has written to its arguments in this run, so that their graphs are no longer those from before."""
        return bool(self._copies)

    @property
    def is_seen_inside(self) -> bool:
        """Return whether hooks may keep tensors of this run that have a graph."""
        return self._observers.are_there

    @property
    def state_tensors(self) -> list[torch.Tensor | None]:
        """Tensors that modules and objects among the arguments refer to; who runs again with their graphs holds them."""
        return [kept.seen for kept in self._state.tensors]

    def saved(self, *, watched: bool) -> list[torch.Tensor]:
        """Return what autograd keeps of the arguments, and let go of them; it need not refuse writes where these are watched."""
        given, self.inputs = self.inputs, []
        if watched:
            return [tensor.data for tensor in given]
        written = self._part.written_inputs
        return [t.detach().clone() if p in written else t for p, t in zip(self._places, given, strict=True)]

    def protect(self, watch: WriteWatch) -> None:
        """Have copies made of arguments that are written to, right before."""
        for place, tensor in zip(self._places, self.inputs, strict=True):
            # the watch alone holds it, as long as others do
            watch.protect(tensor, functools.partial(self._input_is_written, place, weakref.ref(tensor)))

    @property
    def has_large_state(self) -> bool:
        """Return whether there are tensors in its state that are copied only if they are written to."""
        return any(not kept.is_copied for kept in self._state.tensors)

    def protect_state(self, watch: WriteWatch) -> None:
        """Have copies made of what modules and objects refer to, right before it is written to."""
        for kept in self._state.tensors:
            if not kept.is_copied:
                key = kept.storage_key
                watch.protect_storage(key, functools.partial(self._state_is_written, kept, key))

    def protect_weights(self, watch: WriteWatch) -> None:
        """Have copies made of weights that train, right before they are written to."""
        for module in self._part.modules:
            for weight in module._parameters.values():
                if type(weight) is nn.Parameter and weight.requires_grad:
                    key = storage_of(weight)
                    watch.protect_storage(key, functools.partial(self._weight_is_written, weight, key))

    def put_weights_back(self) -> None:
        """Give weights that the first run has written to the values that it found."""
        for weight, before in self._weights.items():
            put_back(weight, before)

    def moves_weights(self, call: Callable[..., Any], saved: Sequence[torch.Tensor]) -> bool:
        """Return whether the part has written to its weights, and would write something else when it runs again.

        They are then as the first run found them.
        """
        weights = self.weights_now()
        if not weights:
            return False
        with self.again(), torch.no_grad():
            args, kwargs = self.arguments(saved)
            call(*args, **kwargs)
        is_same = all(torch.equal(weight, values) for weight, values in weights.items())
        if not is_same:
            self.put_weights_back()
        return not is_same

    def weights_now(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return copies of the weights that have been written to."""
        return {weight: weight.detach().clone() for weight in self._weights}

    def _weight_is_written(self, weight: nn.Parameter, key: int) -> None:
        # one that is offloaded has another storage by then
        if weight not in self._weights and storage_of(weight) == key:
            self._weights[weight] = weight.detach().clone()

    def _input_is_written(self, place: int, reference: weakref.ref[torch.Tensor]) -> None:
        tensor = reference()
        assert tensor is not None
        self._part.written_inputs.add(place)
        self._copies.setdefault(place, tensor.detach().clone())

    def _state_is_written(self, kept: KeptTensor, key: int) -> None:
        # one that is offloaded has another storage by then, and something else is where that one was
        tensor = kept.copy() if kept.storage_key == key else None
        if tensor is not None:
            self._part.written.add(tensor)

    def first(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        products: Products | None = None,  # that are kept of this run
    ) -> Any:
        """Run the part for the first time."""
        with _one_deeper(), self._observers.watched(products):
            output = call(*args, **kwargs)
        for kept in self._state.tensors:
            if kept.run_ended():
                self._part.written.add(kept.original)
        return output

    @contextmanager
    def again(self, *, with_graphs: bool = False) -> Iterator[Repetition]:
        """Context in which the part can be run again; see `State.again`."""
        with (
            _one_deeper(),
            self._state.again(with_graphs=with_graphs) as repetition,
            self._observers.left_out(),
        ):
            yield repetition

    def arguments(self, saved: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments once more, of what autograd has kept."""
        leaves = list(self._others)
        for place, kept in zip(self._places, saved, strict=True):
            if (known := self._first_with[place]) != place:
                leaves[place] = leaves[known]
                continue
            tensor = self._copies.get(place, kept).detach().requires_grad_(place in self._require_grad)
            leaves[place] = tensor.clone() if place in self._part.written_inputs else tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs


def recomputed(
    part: Part,
    call: Callable[..., Any],  # what runs it
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    selective: bool = False,  # keep the results of matrix products and attention
    # that is on around the model's call, in the part's first run; where there is none, one is made
    watch: WriteWatch | None = None,
    run: Run | None = None,  # a run of the same call that went before, whose state is in force
    # called with the run and what autograd keeps of its arguments, when it is over
    then: Callable[[Run, Sequence[torch.Tensor]], None] | None = None,
) -> Any:
    """Run a part so that the backward pass runs it again."""
    run = run or Run(part, args, kwargs)
    if run.cannot_be_repeated:
        return call(*args, **kwargs)
    watched, part.is_watched = not part.is_watched, True
    is_first_call = watch is not None
    given, first_given = [(args, kwargs)], (args, kwargs) if watched else ((), {})
    # bound arguments are not to outlive the first run, which alone gets them
    del args, kwargs
    with ExitStack() as watching:
        if watched or run.has_large_state:
            watch = watch or watching.enter_context(WriteWatch())
            run.protect_state(watch)
        if watched and watch is not None:
            run.protect(watch)
            run.protect_weights(watch)
        products = Products() if selective else None
        block = part.owner if part.span is None else None
        part.runs += 1
        comparison = RecomputationCheck(part.runs, "checkpointing", part.name)
        body = comparison.twice(*_runs(run, call, given, products))
        saved = run.saved(watched=watched)
        try:
            with deferred_interrupts(), comparison.first() as check:
                output = checkpoint(
                    body,
                    *saved,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    determinism_check=check,
                    context_fn=lambda: contexts(block, None if products is None else products.giving()),
                )
        except BaseException as error:
            _leave(error)
            raise
    if watched and run.moves_weights(call, saved):
        if is_first_call or run.writes_to_inputs:
            raise RefusalError(
                "checkpointing",
                f"the forward pass of {part.name} changes its weights, and would once more in the backward pass",
                "use --offload activations",
            )
        del output
        part.why_not_again = "changes its weights as it runs"
        with run.again(with_graphs=True) as repetition:
            repetition.counts = True
            args, kwargs = first_given
            return call(*args, **kwargs)
    if then is not None:
        then(run, saved)
    return output


def _runs(
    run: Run, call: Callable[..., Any], given: list[Any], products: Products | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the first run, and one that runs it again."""

    def first(*_saved: torch.Tensor) -> Any:
        args, kwargs = given.pop()
        with nullcontext() if products is None else products.keeping(), interruptible():
            return run.first(call, args, kwargs, products)

    def again(*saved: torch.Tensor) -> Any:
        if (tell := getattr(_running, "tell", None)) is not None:
            tell(len(run._part.modules), selective=products is not None)
        with run.again(), run.settings.entered(), hooks.within(run.under_way):
            args, kwargs = run.arguments(saved)
            return call(*args, **kwargs)

    return first, again


def _leave(error: BaseException) -> None:
    """Leave the contexts of torch's checkpoint, which otherwise does so when its generator is collected, after a Ctrl-C much later."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):  # the innermost first
        generator = frame.f_locals.get("gen") if frame.f_globals.get("__name__") == checkpoint.__module__ else None
        if isinstance(generator, Generator):
            generator.close()


@contextmanager
def reruns_told_to(tell: Callable[..., None]) -> Iterator[None]:
    """Context in which this thread tells how many modules run again, and whether results of theirs are kept (`selective`)."""
    _running.tell = tell
    try:
        yield
    finally:
        _running.tell = None


@contextmanager
def _one_deeper() -> Iterator[None]:
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        yield
    finally:
        _running.depth -= 1


def _device(inputs: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> torch.device:
    parameters = (parameter for module in modules for parameter in module.parameters())
    found = next(iter(inputs), None)
    found = next(parameters, None) if found is None else found
    return torch.device("cpu") if found is None else found.device


# --- seeing writes ------------------------------------------------------------------------------------


class WriteWatch(StorageWatch):
    """Tells of operators that are about to write to what parts were given, or have by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[torch.Tensor] = []  # a storage's number is its own as long as it lives
        # of these, what was written to outside of parts, and its version then
        self._later: list[tuple[torch.Tensor, int]] = []

    def protect(self, tensor: torch.Tensor, about_to: Callable[[], None]) -> None:
        """Call something before each write to a tensor's storage."""
        with torch._C.DisableTorchFunctionSubclass():  # a class of the user's need not know of such questions
            if tensor.layout is torch.strided and not defers((type(tensor),)):
                self._let_go()
                self._held.append(tensor)
                self.protect_storage(storage_of(tensor), about_to)

    def _let_go(self) -> None:
        """Let go of what nobody else has any more: saved, it is off the device, and nothing can write to it."""
        alone = [(weakref.ref(held), storage_of(held)) for held in self._held if not is_shared(held)]
        self._held = [held for held in self._held if is_shared(held)]
        for reference, key in alone:
            if (held := reference()) is None:
                self._protected.pop(key, None)
            else:
                self._held.append(held)

    def told(self, key: int) -> None:
        if not getattr(_running, "depth", 0):
            self._later += [(held, held._version) for held in self._held if storage_of(held) == key]

    def wrote_past_autograd(self) -> bool:
        """Return whether what a part had been given was written to afterwards, and its version does not count that."""
        return any(held._version == version for held, version in self._later)
