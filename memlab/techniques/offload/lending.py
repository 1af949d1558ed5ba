"""Use of parameters that are kept off the device, and of their gradients, by a loop's own code.

Numbered rules of the mechanism:

1. Between calls of the model a parameter at rest says that it is on the device. A function of torch that uses its values finds
   it there, as does a backward pass that needs them again (`BlockStreaming.lent`).
2. What the loop goes on to hold of it (a view, ``.data``, a state dict) is the parameter: it stays on the device for as long.
   A gradient that the loop reads comes to the device in the same way.
3. What nobody holds any more rests again when the loop reads something else, calls the model or updates it.
4. torch's own functions for gradients (`clip_grad_norm_`, `zero_grad`) use them where they rest, device by device.
5. Where there is no room on the device, as there would not be without memlab, values are used where they rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import nn

from memlab.runtime.away import ASK_FOR_THE_DEVICE
from memlab.runtime.backward import is_in_backward
from memlab.runtime.callers import is_memlab_code, module_of
from memlab.runtime.lifetimes import gradient_is_held, is_saved, is_shared
from memlab.runtime.mechanisms import Turns
from memlab.runtime.touch import SET_DATA, SET_GRAD, WatchedTensors, uses_values, written_in_place
from memlab.techniques.offload.block_streaming import BlockStreaming, fills_its_storage
from memlab.techniques.offload.spill import PLAIN

Parameter = nn.Parameter

_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]


class Lending(WatchedTensors, Turns):
    """Lends parameters at rest to the loop's own code.

    Args:
        watched: those that are lent.
        parameters: all that rest.
        streaming: where they rest.
        send_away: puts a parameter of the device, and its gradient, to rest.
        send_gradient: puts the gradient of a parameter at rest there.
    """

    def __init__(
        self,
        watched: Sequence[Parameter],
        parameters: Sequence[Parameter],
        streaming: BlockStreaming,
        send_away: Callable[[Parameter], None],
        send_gradient: Callable[[Parameter], None],
    ) -> None:
        super().__init__(lambda: watched)
        self._parameters, self._streaming = parameters, streaming
        self._ids = frozenset(map(id, watched))
        self._send_away, self._send_gradient = send_away, send_gradient
        self._lent: dict[int, Parameter] = {}  # by id: parameters of which something is on the device
        self._is_loops_turn = False
        self._on_device = torch.empty(0, device=streaming.link.device)

    def handed_back(self) -> None:
        """The loop goes on."""
        self._is_loops_turn = True
        self.watch()

    def taken_over(self) -> None:
        """The model goes on, the plan changes, or an update begins."""
        self._is_loops_turn = False
        self.leave()
        self.rest_again()

    def holds_gradient(self, parameter: Parameter) -> bool:
        """Return whether the loop holds the gradient of a parameter."""
        return id(parameter) in self._lent and gradient_is_held(parameter)

    def visit_over(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look after parameters again that were left for an update."""
        if self._is_loops_turn:
            self.watch([parameter for parameter in parameters if id(parameter) in self._ids])

    # -- what the loop does ----------------------------------------------------------------------

    def _methods(self, kind: type[torch.Tensor]) -> dict[str, Any]:
        def __deepcopy__(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:  # noqa: N807 - Python's name
            self.leave([tensor])
            try:
                with self._streaming.lent([tensor]):  # type: ignore[list-item] # a parameter
                    return kind.__deepcopy__(tensor, memo)  # type: ignore[no-untyped-call]
            finally:
                self.watch([tensor])

        return super()._methods(kind) | {"__deepcopy__": __deepcopy__}

    def _asked(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            is_own = is_memlab_code(frame) or torch._C._are_functorch_transforms_active()
            if function == _GET_GRAD and not is_own and not module_of(frame).startswith("torch."):
                self._bring_gradient(args[0])
            if self._are_own(types) and (is_own or not self._is_at_rest(args, kwargs)):
                return function(*args, **kwargs)
            if function in ASK_FOR_THE_DEVICE:
                return function(self._on_device)
            if function == SET_GRAD and _is_alike(*args):
                return set_gradient(*args)
            if self._are_own(types) and (not uses_values(function) or function == SET_DATA):
                return function(*args, **kwargs)
        parameters: Any = self._watched_in(args, kwargs)
        self.rest_again(list(self._lent.values()))
        # versions do not say it of every function: of those of lists some kernels leave them alone
        written = {*map(id, written_in_place(function, args, kwargs))}
        with self._left(args, kwargs), self._streaming.lent(parameters, written):
            result = function(*args, **kwargs)
        self._lent |= {id(p): p for p in parameters if self._streaming.resting(p) is None}
        return result

    def _is_at_rest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return any(self._streaming.resting(tensor) is not None for tensor in self._watched_in(args, kwargs))

    def _bring_gradient(self, parameter: Parameter) -> None:
        self.rest_again(list(self._lent.values()))
        gradient, link = parameter.grad, self._streaming.link
        is_at_rest = self._streaming.resting(parameter) is not None
        if gradient is None or type(gradient) not in PLAIN or gradient.device == link.device:
            return
        if is_at_rest or parameter.device == link.device:
            with suppress(torch.OutOfMemoryError):
                set_gradient(parameter, link.fetch(gradient).wait())
            self._lent[id(parameter)] = parameter
            self._streaming.on_use(parameter)

    # -- at rest again -------------------------------------------------------------------------

    def rest_again(self, parameters: Sequence[Parameter] | None = None) -> None:
        """Put to rest what nobody holds, of all parameters or some; within a backward pass nothing."""
        if is_in_backward():
            return
        home = self._streaming.link.device
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in self._parameters if parameters is None else parameters:
                self._lent.pop(id(parameter), None)
                is_at_rest = self._streaming.resting(parameter) is not None
                if not is_at_rest and _may_leave(parameter, home):
                    self._send_away(parameter)
                elif not is_at_rest:
                    self._lent[id(parameter)] = parameter
                elif parameter.grad is not None and parameter.grad.device == home:
                    if gradient_is_held(parameter):
                        self._lent[id(parameter)] = parameter
                    else:
                        self._send_gradient(parameter)


def set_gradient(parameter: Parameter, gradient: torch.Tensor) -> None:
    """Give a parameter a gradient on the device, which torch allows beside data that are there."""
    if parameter.grad is not gradient:
        data = parameter.data
        parameter.grad = None
        parameter.data = gradient.detach()
        parameter.grad = gradient
        parameter.data = data


def _may_leave(parameter: Parameter, home: torch.device) -> bool:
    """Return whether a parameter is on its device, its own storage's only tensor, no graph has saved it, and no gradient of it is held."""
    return (
        parameter.device == home
        and fills_its_storage(parameter)
        and not is_shared(parameter)
        and not is_saved(parameter)
        and not gradient_is_held(parameter)
    )


def _is_alike(parameter: Parameter, gradient: Any) -> bool:
    return isinstance(gradient, torch.Tensor) and (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
