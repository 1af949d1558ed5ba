"""Saving, copying and loading of tensors in their own form while they are kept in another.

Rules:

1. Pickling and copying look for ``__reduce_ex__`` and ``__deepcopy__`` on a tensor before they look on its class. The ones put
   there make an ordinary tensor with the user's values, so that files and copies know nothing of memlab.
2. Modules answer `state_dict()`, their own or that of a module they are part of, with the user's values, which share memory with
   those of the parameter, as torch's do; where there is no room for that, these are copies in host memory. With ``keep_vars`` torch gives the live parameters, which stay what they are.
3. Loading, moves and casts (``model.float()``), assigning a parametrized weight (which compares dtypes), and
   `save_pretrained`, which reads more of a model than its state, run while tensors have their own form. A cast to another one is refused.

Known limitations: parameters that ``load_state_dict(assign=True)`` puts in place of the old ones are not converted.
"""

from __future__ import annotations

import copy
import multiprocessing.context
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from memlab.errors import RefusalError
from memlab.runtime.aliases import is_in_shared_memory
from memlab.runtime.away import as_on
from memlab.runtime.homes import home_of
from memlab.runtime.interrupts import deferred_interrupts, interruptible
from memlab.runtime.out_of_memory import is_out_of_memory, with_room
from memlab.runtime.stand_ins import stand_in
from memlab.runtime.touch import own_class
from memlab.techniques.precision.masters import Masters

_NAMES = ("__reduce_ex__", "__deepcopy__")


class OwnForm:
    """Gives a model's tensors out in their own form."""

    def __init__(
        self,
        masters: Masters,
        restored: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]],
    ) -> None:
        self._masters = masters  # gives the values in their own form
        # context in which some tensors have their own form, and are converted again at its end
        self._made_restored = restored

    @contextmanager
    def _restored(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        with ExitStack() as inside:
            with_room(lambda: inside.enter_context(self._made_restored(tensors)))
            yield

    def serve(self, model: nn.Module, tensors: Sequence[torch.Tensor], undo: ExitStack) -> None:
        """Answer for some tensors of a model, until undone."""
        served = {id(tensor) for tensor in tensors}
        for tensor in tensors:
            undo.callback(_without_attributes, tensor)
            for name, answer in zip(_NAMES, (self._reduced, self._copied), strict=True):
                setattr(tensor, name, partial(answer, weakref.ref(tensor)))
        for module in model.modules():
            there, has_served = weakref.ref(module), any(id(tensor) in served for _, tensor in _tensors_of(module))
            if has_served:
                stand_in(module, "_save_to_state_dict", partial(self._save, there), undo)
                stand_in(module, "_load_from_state_dict", partial(self._load, there), undo)
                if isinstance(module, ParametrizationList):
                    stand_in(module, "right_inverse", partial(self._assign, there), undo)
            if has_served or module is model:  # the model, so that a cast is refused before any part of it is done
                stand_in(module, "_apply", partial(self._convert, there), undo)
        if hasattr(type(model), "save_pretrained"):
            stand_in(model, "save_pretrained", partial(self._save_pretrained, weakref.ref(model)), undo)

    # -- pickles and copies --------------------------------------------------------------------

    def _reduced(self, tensor: weakref.ref[Any], protocol: Any) -> Any:
        live: Any = tensor()
        made = self._ordinary(live)
        vars(made).update(_own_attributes(live))
        process = multiprocessing.context.get_spawning_popen()
        if process is not None:  # it gets the descriptor of the memory, which must be open when it is started
            vars(process).setdefault("_tensors_of_memlab", []).append(made)
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copied(self, tensor: weakref.ref[Any], memo: dict[int, Any]) -> torch.Tensor:
        live: Any = tensor()
        made = self._ordinary(live)
        if not isinstance(live, nn.Parameter):  # as torch does
            vars(made).update(copy.deepcopy(_own_attributes(live), memo))
        memo[id(live)] = made
        return made

    def _ordinary(self, live: torch.Tensor) -> torch.Tensor:
        values = with_room(partial(self._masters.copied, live))
        if isinstance(live, nn.Parameter):
            kind: type[nn.Parameter] = own_class(live)
            return kind(values, requires_grad=live.requires_grad)
        return values.requires_grad_(live.requires_grad)

    # -- state dicts ---------------------------------------------------------------------------

    def _save(self, there: weakref.ref[nn.Module], destination: Any, prefix: str, keep_vars: bool) -> None:
        module: Any = there()
        with self._masters.lock:
            with torch._C.DisableTorchFunctionSubclass():  # reading for a file is no touch
                type(module)._save_to_state_dict(module, destination, prefix, keep_vars)
            if keep_vars:
                return
            for name, tensor in _tensors_of(module):
                key = prefix + name
                if key in destination and (values := self._shown(tensor)) is not None:
                    destination[key] = values

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return values that share memory with those of a tensor; where there is no room for them, a copy in host memory."""
        try:
            values = with_room(partial(self._masters.show, tensor))
            return None if values is None else values.detach()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            home = home_of(tensor)
            values = None if home.type == "cpu" else self._masters.values(tensor, on_host=True)
            if values is None:
                raise
            return as_on(home, values)

    def _load(self, there: weakref.ref[nn.Module], *args: Any, **kwargs: Any) -> None:
        module: Any = there()
        with self._restored([tensor for _, tensor in _tensors_of(module)]):
            type(module)._load_from_state_dict(module, *args, **kwargs)

    def _assign(self, there: weakref.ref[nn.Module], value: torch.Tensor) -> None:
        module: Any = there()
        with self._restored([tensor for _, tensor in _tensors_of(module)]):
            type(module).right_inverse(module, value)

    def _convert(
        self, there: weakref.ref[nn.Module], change: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        module: Any = there()
        # asked before any tensor of the model is changed
        changed = change(torch.empty(0, dtype=torch.float32, device="cpu"))
        is_shared = is_in_shared_memory(changed)
        if changed.dtype is not torch.float32 or is_shared:
            form = "shared memory" if is_shared else str(changed.dtype).removeprefix("torch.")
            raise RefusalError(
                "precision",
                f"the loop converts {type(module).__name__} to {form}, and --precision pure-bf16 keeps its weights",
                "leave the precision as it is, or undo it before (%memfit undo)",
                in_loop=True,
            )
        with self._restored([tensor for _, tensor in _tensors_of(module)]):
            return type(module)._apply(module, change, *args, **kwargs)

    def _save_pretrained(self, there: weakref.ref[nn.Module], *args: Any, **kwargs: Any) -> Any:
        model: Any = there()
        with deferred_interrupts(), self._restored([*model.parameters(), *model.buffers()]), interruptible():
            return type(model).save_pretrained(model, *args, **kwargs)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers, by name."""
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def _own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name not in _NAMES}


def _without_attributes(tensor: torch.Tensor) -> None:
    for name in _NAMES:
        vars(tensor).pop(name, None)
