"""Checkpointing of compiled code: the compiler's own budget for what stays between forward and backward.

1. In a training call each part that ``torch.compile`` has compiled runs through code that the same compiler makes once
   more, with the same settings. While it splits forward from backward, and at no other time,
   ``torch._functorch.config.activation_memory_budget`` says how much of what it would keep may stay.
2. torch keeps compiled code by the compiler that made it. The user's own stays where it is: it runs again, without being
   made again, when the plan goes, in evaluation, and in every other function.
3. What comes with the plan again is found in torch's cache as well, since the compiler is the same object.
4. What draws random numbers is always kept. Under a budget torch 2.13 makes dropout's mask again in the backward pass
   without the numbers of the forward pass, unless the backend draws from seeds of its own, as inductor does.

The budget is a tenth. Six residual feed-forward parts of 64 to 256 features, compiled by aot_eager, 512 rows: a peak of
9.4 MB as written, 6.1 MB with budgets of 0.9 to 0.4, 4.1 MB with 0.1, and 9.4 MB with 0, where the backward pass makes
everything again before it uses any.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from memlab.errors import RefusalError
from memlab.runtime.interrupts import interruptible
from memlab.runtime.stand_ins import CALL, own_attributes

_BUDGET = 0.1
_SPLITS = "choose_saved_values_set"  # torch's function that reads the budget

# one for all that is compiled alike: torch shares code among modules of one class that have the same compiler
_compilers: list[_WithBudget] = []


_is_uncompiled: ContextVar[bool] = ContextVar("uncompiled", default=False)


class _WithBudget:
    """A compiler that keeps to the budget, and notes whether it ever asked for it, and how often what it made ran."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own
        self.has_asked = False
        self.runs = 0

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._functorch import config, partitioners

        split = getattr(partitioners, _SPLITS)

        def asked(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.has_asked = True
            for node in graph.nodes:
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            kept = split(graph, *args, **kwargs)
            # of an operator with several results, those are what can be kept
            several = {node: list(node.users) for node in kept if isinstance(node.meta.get("val"), (tuple, list))}
            return [each for node in kept for each in several.get(node, [node])]

        # what torch finds on the disk is split already
        settings = {"activation_memory_budget": _BUDGET, "enable_autograd_cache": False}
        with config.patch(settings), mock.patch.object(partitioners, _SPLITS, asked):
            made = self.own(graph, inputs, **options)

        @functools.wraps(made)
        def counted(*args: Any) -> Any:
            self.runs += 1
            return made(*args)

        return counted


class CompiledParts:
    """The compiled parts of a model, to be called under the budget.

    Raises:
        RefusalError: this torch does not tell how a part was compiled, or has no such budget.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name = name
        self._model = weakref.ref(model)
        self._is_known = False
        self._compilers = {part: _with_budget(compiled, name) for part, compiled in _compiled_parts(model)}
        self._calls = {part: _again(compiled, self._compilers[part]) for part, compiled in _compiled_parts(model)}

    def call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one training call of the model. Raises `RefusalError`: the compiler did not ask for the budget, or torch compiled nothing again."""
        if _is_uncompiled.get():
            return original(*args, **kwargs)
        if self._is_known:
            return self._run(original, args, kwargs)
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit

        compilers = self._compilers.values()
        runs_before = sum(compiler.runs for compiler in compilers)
        try:
            with config.patch(fail_on_recompile_limit_hit=True):
                output = self._run(original, args, kwargs)
        except FailOnRecompileLimitHit:
            raise _refusal(f"{self._name} is compiled, and torch has reached its limit of recompilations") from None
        if sum(compiler.runs for compiler in compilers) == runs_before:  # as of modules that come with torch
            nothing = f"torch compiles nothing of {self._name}, though it was asked to"
            raise RefusalError("checkpointing", nothing, "make it anew without compile(), or use --accumulate N")
        if not any(compiler.has_asked for compiler in compilers):
            what = "its backend does not split forward from backward by torch's partitioner, which is what keeps to a budget"
            raise _refusal(f"{self._name} is compiled, and {what}")
        self._is_known = True
        return output

    def _run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        whole = self._calls.get(self._model())  # type: ignore[arg-type] # a key that is not there
        if whole is not None:
            with interruptible():
                return whole(*args, **kwargs)
        with self._in_place():
            return original(*args, **kwargs)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Parts are called under the budget; what was there comes back whatever happens."""
        keys = {part: "forward" if _is_wrapper(part) else CALL for part in self._calls}
        before = {part: vars(part)[key] for part, key in keys.items()}
        try:
            for part, key in keys.items():
                vars(part)[key] = self._calls[part]
            yield
        finally:
            for part, key in keys.items():
                vars(part)[key] = before[part]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Have compiled models run the code they were compiled from."""
    token = _is_uncompiled.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _is_uncompiled.reset(token)


def _refusal(reason: str) -> RefusalError:
    return RefusalError(
        "checkpointing", reason, "compile it with inductor, put the plan on the model uncompiled, or use --accumulate N"
    )


def _is_wrapper(part: nn.Module) -> bool:
    return type(part).__name__ == "OptimizedModule"


def _compiled_parts(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """The outermost compiled parts, each with the function that runs its code."""
    inside: set[int] = set()
    for part in model.modules():
        attributes = own_attributes(part)
        compiled = attributes.get("forward") if _is_wrapper(part) else attributes.get(CALL)
        if compiled is not None and id(part) not in inside:
            inside |= {id(each) for each in part.modules()}
            yield part, compiled


def _context(compiled: Callable[..., Any]) -> Any:
    """Return what ``torch.compile`` noted of how a function was compiled; None where it cannot be read."""
    return inspect.getclosurevars(compiled).nonlocals.get("self") if inspect.isfunction(compiled) else None


def _with_budget(compiled: Callable[..., Any], name: str) -> _WithBudget:
    """The user's compiler under the budget, always the same object."""
    try:
        from torch._dynamo import config as dynamo
        from torch._dynamo.eval_frame import innermost_backend
        from torch._functorch import config, partitioners

        context = _context(compiled)
        own = innermost_backend(context.callback)
        for holder, attribute in (
            (context, "fullgraph"),
            (context, "_dynamic"),
            (compiled, "_torchdynamo_orig_callable"),
            (partitioners, _SPLITS),
            (config, "activation_memory_budget"),
            (dynamo, "fail_on_recompile_limit_hit"),
        ):
            getattr(holder, attribute)
    except (AttributeError, ImportError):
        version = torch.__version__
        raise _refusal(f"{name} is compiled, and torch {version} does not tell how, or keeps to no budget") from None
    known = next((each for each in _compilers if each.own == own), None)
    if known is None:
        known = _WithBudget(own)
        _compilers.append(known)
    return known


def _again(compiled: Callable[..., Any], compiler: _WithBudget) -> Callable[..., Any]:
    """Return what calls a part through code that is compiled under the budget."""
    context: Any = _context(compiled)
    original = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined] # of what torch.compile returns
    return torch.compile(original, backend=compiler, fullgraph=context.fullgraph, dynamic=context._dynamic)
