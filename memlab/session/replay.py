"""`Replay`: runs a recorded step of a loop again, with other models and tensors in place of those it had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from memlab.errors import TraceError
from memlab.runtime.batch import Batch
from memlab.runtime.tree import flatten, tensors_in
from memlab.session.tape import GRADIENT, Tape, TapeCall, TapeEntry, TapePart, TapeUpdate, TapeValue, by_place


class Replay:
    """Runs a tape again, step after step."""

    def __init__(
        self,
        tape: Tape,  # without a problem
        models: Mapping[int, nn.Module],  # what stands for each of its models, by the number (`id`) of that one
        optimizers: Mapping[int, Optimizer],  # likewise
        # what stands for a tensor that the loop was given; by default itself, or a copy where the step writes to it
        stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None,
        batch: Batch | None = None,  # what the first call is given; by default what was recorded of it
    ) -> None:
        self._tape = tape
        self._stand_in = stand_in
        self._batch = {} if batch is None else _given_to_first_call(tape, batch)
        self._entries = tape.entries
        self._gradients = tape.gradients
        self._models = [models[id(model())] for model in tape.models]
        self._optimizers = [optimizers[id(optimizer())] for optimizer in tape.optimizers]
        self._parts = [[*model.parameters(), *model.buffers()] for model in self._models]
        self._values: dict[int, torch.Tensor] = {}
        self._give()
        # what outlives the step because a parameter holds it
        self._held = {number for entry in tape.entries if entry.what == GRADIENT for number in entry.results.values()}
        # of those, what the loop does not let go of within the step: the parameters' alone, as techniques refuse or spare
        # gradients that somebody else has
        gone = {number for entry in tape.entries for number in (*entry.before, *entry.after)}
        self._of_parameters: dict[int, TensorWeakRef | None] = dict.fromkeys(self._held - gone)

    def _give(self) -> None:
        """Have what the loop is given there, also what it let go of in the step before."""
        for number, given in self._tape.given.items():
            tensor = self._batch.get(number, given())
            if number in self._values or tensor is None:
                continue
            if self._stand_in is not None:
                self._values[number] = self._stand_in(tensor)
            else:
                if tensor.is_meta:
                    tensor = torch.zeros_like(tensor, device=next(self._models[0].parameters()).device)
                is_written = number in self._tape.written
                self._values[number] = (
                    tensor.detach().clone().requires_grad_(tensor.requires_grad) if is_written else tensor
                )

    def begin(self) -> None:
        """Make the gradients that are there when the step begins."""
        for parameter in map(self._leaf, self._gradients):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        """Run the step once more; what outlives it is there in the next."""
        self._give()
        with ExitStack() as modes:
            mode: Any = None
            for entry in self._entries:
                if entry.mode != mode:
                    modes.close()
                    mode = entry.mode
                    _enter(modes, *mode)
                self._drop(entry.before)
                self._run(entry)
                self._drop(entry.after)
        self._drop(self._held)

    def _is_gone(self, number: int) -> bool:
        """Return whether a gradient is not there that was there in the loop, as when a plan has released it."""
        return number in self._held and self._value(number) is None

    def _value(self, number: int) -> torch.Tensor | None:
        reference = self._of_parameters.get(number)
        return self._values.get(number) if reference is None else reference()

    def _keep(self, number: int, tensor: torch.Tensor) -> None:
        if number in self._of_parameters:
            self._of_parameters[number] = TensorWeakRef(tensor)
        else:
            self._values[number] = tensor

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._values.pop(number, None)
            if number in self._of_parameters:
                self._of_parameters[number] = None

    def _run(self, entry: TapeEntry) -> None:
        what = entry.what
        if isinstance(what, TapeUpdate):
            self._optimizers[what.optimizer].step()
            return
        if any(isinstance(leaf, TapeValue) and self._is_gone(leaf.number) for leaf in entry.leaves):
            self._held.update(entry.results.values())
            return  # a loop leaves out what has no gradient
        args, kwargs = entry.structure.put([self._leaf(leaf) for leaf in entry.leaves])
        if isinstance(what, TapeCall):
            model = self._models[what.model]
            if model.training is not what.is_training:
                model.train(what.is_training)
            results = by_place(model(*args, **kwargs))  # which may be fewer, as without a key-value cache
        else:
            results = dict(enumerate(tensors_in(what(*args, **kwargs))))
            if results and len(results) != len(entry.results):
                raise TraceError(f"{what} gives {len(results)} tensors, and gave {len(entry.results)} in the loop")
        del args, kwargs
        for place, number in entry.results.items():
            if number >= 0 and place in results:
                self._keep(number, results[place])

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, TapeValue):
            value = self._value(leaf.number)
            if value is None:
                raise TraceError("the loop uses an output of the model that there is none of under this plan")
            return value
        return self._parts[leaf.model][leaf.place] if isinstance(leaf, TapePart) else leaf


def _given_to_first_call(tape: Tape, batch: Batch) -> dict[int, torch.Tensor]:
    first = next(entry for entry in tape.entries if isinstance(entry.what, TapeCall))
    leaves, structure = flatten((batch.args, dict(batch.kwargs)))
    if structure != first.structure:
        return {}
    pairs = zip(first.leaves, leaves, strict=True)
    return {
        leaf.number: value for leaf, value in pairs if isinstance(leaf, TapeValue) and isinstance(value, torch.Tensor)
    }


def _enter(modes: ExitStack, has_graph: bool, device_type: str, dtype: torch.dtype | None) -> None:
    modes.enter_context(torch.set_grad_enabled(has_graph))
    if device_type:
        modes.enter_context(torch.autocast(device_type, dtype))
