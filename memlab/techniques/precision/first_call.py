"""`FirstCalls`: the first call of a model, whose errors may be those of half precision."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import register_multi_grad_hook

from memlab.errors import MemlabError, RefusalError, first_line, listed
from memlab.plan import Precision
from memlab.runtime.containers import Effect
from memlab.runtime.graphs import functions_of_users, nodes_of
from memlab.runtime.hooks import is_compiled
from memlab.runtime.out_of_memory import is_out_of_memory
from memlab.runtime.rng import Randomness
from memlab.runtime.stand_ins import is_ours
from memlab.runtime.surroundings import Copies, Surroundings
from memlab.runtime.tree import flatten, tensors_in
from memlab.techniques.base import ModelCall
from memlab.techniques.precision.masters import Masters

_FIELD = "precision"
_AS_IT_IS = "leave its precision as it is"
AUTOCAST_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
# as torch's errors about types say it
_NAMES_HALF = re.compile(
    r"(?=.*\b(BFloat16|bfloat16|Half|float16)\b).*\b(expected|implemented|supported|same (data)?type|same dtype|match)",
    re.DOTALL,
)


class FirstCalls:
    """Refuses models that half precision is not for, when they are first called; nothing of that call is left behind."""

    def __init__(
        self,
        precision: Precision,
        lowered: Callable[[ModelCall, tuple[Any, ...], Mapping[str, Any]], Any],
        masters: Masters,
        in_fp32: Callable[[nn.Module], AbstractContextManager[Any]],
    ) -> None:
        self._precision = precision
        self._lowered = lowered  # runs a call in it
        self._masters = masters  # of the weights under pure bf16
        self._in_fp32 = in_fp32  # context in which a model, or a part of one, is as it was written

    def run(
        self,
        name: str,  # of the model, in words
        model: nn.Module,
        call: ModelCall,  # runs it
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        but: str = "",  # what of it is not in half precision, in words
    ) -> Any:
        """Run the first call of a model, or by the loop of a part.

        Raises:
            RefusalError: the model does not run in it; nothing of the call is left behind.
        """
        if self._precision is Precision.FP16:
            refuse_backward_hooks(name, model)
        before, randomness = _left_by(model)
        frozen = self._copies_of_frozen(model)
        # a mode within which something is compiled would be part of what torch compiles it for
        pure = self._precision is Precision.PURE_BF16 and not is_compiled(model)
        instead = _AS_IT_IS
        try:
            hooks = _hooks_of_users() if self._precision is Precision.FP16 else nullcontext(())
            with before.writing() if pure else nullcontext(), hooks as hooked:
                output = self._lowered(call, args, kwargs)
        except Exception as error:
            for each in frozen:
                each.put_back()
            if isinstance(error, RefusalError):
                before.begin_again(strict=False)
                randomness.restore()
            if is_out_of_memory(error) or isinstance(error, MemlabError):
                raise
            said = but + first_line(error)
        else:
            written = [*before.written(), *((each.name, each.tensor) for each in frozen if each.put_back())]
            if written:
                before.begin_again(strict=False)
                randomness.restore()
                self._keep_whole(name, written)
                whole = listed([which for which, _ in written])
                said = f"with {whole}, which its forward pass changes, in fp32: "
                return self.run(name, model, call, args, kwargs, but=said)
            why = _computing_later(output, self._precision)
            if why is None and self._precision is Precision.FP16:
                why = _seeing_scale(before.effects(), output, hooked)
                instead = "use --bf16"
            if why is None:
                return output
            said = why
        before.begin_again(strict=False)
        randomness.restore()
        raise self._refusal(name, model, lambda: call(*args, **kwargs), said, frozen, instead)

    def refuse_later(
        self, name: str, model: nn.Module, run: Callable[[], Any], error: Exception, *, is_late: bool = False
    ) -> NoReturn:
        """Raise what ended a later call of a model.

        Args:
            name: of the model, in words.
            model: the model.
            run: runs the call in full precision.
            error: what it has raised in half precision.
            is_late: see `MemlabError`.

        Raises:
            RefusalError: the call runs in full precision; what the failed one has left is still there.
            Exception: the model's own error; what the call has left, it has left once.
        """
        left, randomness = _left_by(model)
        try:
            refusal = self._refusal(name, model, run, first_line(error), ())
        except BaseException:
            left.begin_again(strict=False)
            randomness.restore()
            raise
        refusal.is_late = is_late
        raise refusal from None

    def _refusal(
        self,
        name: str,
        model: nn.Module,
        run: Callable[[], Any],
        said: str,
        frozen: Sequence[_Frozen],
        instead: str = _AS_IT_IS,
    ) -> RefusalError:
        """Return the refusal of a model of which a call runs in full precision; that leaves nothing behind.

        Nor is an error the model's own that names half precision, and is another one there: what was computed before the
        call, and is kept, is in half precision still.

        Raises:
            Exception: the model's own error, which leaves what the call has left.
        """
        before, randomness = _left_by(model)
        with self._in_fp32(model):
            masters = [(tensor, tensor.detach().clone()) for tensor in (each.tensor for each in frozen)]
            try:
                run()
            except Exception as error:
                if not names_half(error) or said.endswith(first_line(error)):
                    raise
            for tensor, master in masters:
                if not torch.equal(tensor, master):
                    tensor.data = master
        before.begin_again(strict=False)
        randomness.restore()
        return refusal_of(name, self._precision, said, instead)

    def _copies_of_frozen(self, model: nn.Module) -> list[_Frozen]:
        """Tensors in bf16 that no optimizer updates, by name, with copies: a forward pass may write to them.

        None where they are most of the model: base weights beside adapters, which nothing writes to. Nor buffers of torch's
        own modules: those of batch norm are in fp32, and spectral norm makes its own anew.
        """
        frozen = [
            (f"{path}.{name}" if path else name, each, table)
            for path, part in model.named_modules()
            for table in (part._parameters, _buffers_of_users(part))
            for name, each in table.items()
            if each is not None and each in self._masters and not each.requires_grad
        ]
        is_twin = any(isinstance(tensor, FakeTensor) for _, tensor, _ in frozen)  # has no values to lose
        if is_twin or _are_most(model, [tensor for _, tensor, _ in frozen]):
            return []
        return [_Frozen(*each) for each in frozen]

    def _keep_whole(self, name: str, written: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Keep in fp32 what a forward pass writes to: in bf16 small changes would be lost.

        Raises:
            RefusalError: they are weights, which layers want in the form of their inputs.
        """
        for which, tensor in written:
            if isinstance(tensor, nn.Parameter):
                raise RefusalError(
                    _FIELD,
                    f"the forward pass of {name} changes the weight {which}, and bf16 would lose small changes",
                    "use --bf16",
                )
        for _, tensor in written:
            self._masters.join(tensor)


def _seeing_scale(effects: Mapping[str, Effect], output: Any, hooked: Sequence[str]) -> str | None:
    """Say what of a call under fp16 is given gradients that are scaled, or comes in past the output, where they are; None for none.

    What the output is made of (a weight that is normed anew in each call) does not come in past it: who uses it there is
    refused by the backward pass.
    """
    left = {
        name: leaf
        for name, effect in effects.items()
        for leaf in flatten(effect.value)[0]
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }
    with torch._C.DisableTorchFunctionSubclass():  # logits that wait are not computed for this
        within = nodes_of(tensors_in(output))
    if past := next((name for name, leaf in left.items() if leaf.grad_fn not in within), None):
        return f"its gradients are scaled at the output, and {past} is past it"
    seeing = [
        *(f"{name}.backward" for name in sorted(functions_of_users(within))),
        *(f"a hook ({name})" for name in hooked),
        *(f"{name}.grad" for name, leaf in left.items() if leaf.retains_grad),
    ]
    return f"{seeing[0]} would be given gradients multiplied by the loss scale" if seeing else None


@contextmanager
def _hooks_of_users() -> Iterator[list[str]]:
    """Context that gives the names of functions which the user's code registers as hooks of tensors within."""
    found: list[str] = []
    register = torch.Tensor.register_hook

    def heard(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if not is_ours(hook):
            found.append(getattr(hook, "__qualname__", type(hook).__name__))
        return register(tensor, hook)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = heard  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]


def _left_by(model: nn.Module) -> tuple[Surroundings, Randomness]:
    """Return what a model's forward may change, with copies: writes to `.data` are seen by values alone.

    Not of frozen parameters where they are most of the model, as base weights beside adapters.
    """
    found = Surroundings(model, complete=True, frozen=_copies_frozen(model))
    return found, Randomness(found.generators)


def copied(model: nn.Module) -> list[int]:
    """Return sizes of the copies that the first call of a model keeps until it is known to run, in bytes."""
    return Copies(model, complete=True, frozen=_copies_frozen(model)).sizes


def _copies_frozen(model: nn.Module) -> bool:
    return not _are_most(model, [parameter for parameter in model.parameters() if not parameter.requires_grad])


def _are_most(model: nn.Module, frozen: Sequence[torch.Tensor]) -> bool:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return sum(tensor.numel() for tensor in frozen) > 2 * trained


def _buffers_of_users(part: nn.Module) -> dict[str, torch.Tensor | None]:
    return {} if type(part).__module__.startswith("torch.") else part._buffers


class _Frozen:
    """A tensor in bf16 that a forward pass may write to, or put another one in place of."""

    def __init__(self, name: str, tensor: torch.Tensor, table: Mapping[str, Any]) -> None:
        self.name, self.tensor = name, tensor
        self._table = table  # of the part that it belongs to
        self._data, self._version = tensor.detach(), tensor._version
        self._copy = self._data.to("cpu", copy=True)

    def put_back(self) -> bool:
        """Give it its values again where it has been written to; an equal value may be what is left of a small change."""
        is_there = self._table.get(self.name.rpartition(".")[2]) is self.tensor
        is_same = is_there and self.tensor._version == self._version and self.tensor.data_ptr() == self._data.data_ptr()
        if is_same and torch.equal(self._data.cpu().view(torch.int16), self._copy.view(torch.int16)):
            return False
        self.tensor.data = self._data.copy_(self._copy)
        return True


def refusal_of(name: str, precision: Precision, said: str, instead: str = _AS_IT_IS) -> RefusalError:
    """Return the refusal of a model that does not run in a format, as was said."""
    return RefusalError(_FIELD, f"{name} does not run in {precision}: {said}", instead)


def names_half(error: Exception) -> bool:
    """Return whether an error is one of torch's about types, and names one of half precision."""
    return _NAMES_HALF.match(str(error)) is not None


def refuse_computing_later(name: str, output: Any, precision: Precision) -> None:
    """Refuse an output that computes when the loop uses it, past autocast. Raises `RefusalError`: it does."""
    said = _computing_later(output, precision)
    if said is not None:
        raise refusal_of(name, precision, said)


def _computing_later(output: Any, precision: Precision) -> str | None:
    """Say which part of an output computes when the loop uses it, past autocast; None for none."""
    if precision not in AUTOCAST_DTYPES:
        return None
    for leaf in flatten(output)[0]:
        held = [*leaf.args, *leaf.keywords.values()] if isinstance(leaf, functools.partial) else []
        for cell in (leaf.__closure__ or ()) if isinstance(leaf, types.FunctionType) else ():
            with suppress(ValueError):  # a variable without a value yet
                held.append(cell.cell_contents)
        if isinstance(leaf, types.GeneratorType) or any(map(_is_of_graph, held)):
            return f"its output is a {type(leaf).__name__}, which computes when the loop uses it, past {precision}"
    return None


def _is_of_graph(value: Any) -> bool:
    """Return whether a value is a layer, or a tensor that gradients go to or that has few bits."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad or value.dtype in AUTOCAST_DTYPES.values()
    return isinstance(value, nn.Module)


def is_awaited_with_others(parameter: nn.Parameter) -> bool:
    """Return whether a hook waits for the gradients of a parameter and of others: it counts nodes that made them once."""
    hooks = (parameter._backward_hooks or {}).values()
    # a hook that comes to each by itself, or to the first, bears the name of the loop's own function
    return any(getattr(hook, "__module__", None) == register_multi_grad_hook.__module__ for hook in hooks)


def refuse_backward_hooks(name: str, model: nn.Module) -> None:
    """Refuse a model whose parts have backward hooks, for fp16. Raises `RefusalError`: it has some."""
    inner = islice(model.named_modules(), 1, None)  # hooks of the model itself are outside of the scale
    hooked = next((name for name, part in inner if part._backward_hooks or part._backward_pre_hooks), None)
    if hooked is not None:
        raise RefusalError(
            _FIELD,
            f"{name} has a backward hook ({hooked}), which would be given gradients multiplied by the loss scale",
            "use --bf16",
        )
