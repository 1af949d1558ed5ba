"""`Usage`: how a loop uses the model, and which settings have no effect because of that."""

from __future__ import annotations

from functools import reduce

import torch

from memlab.plan import Gradients, Plan
from memlab.runtime.graphs import gradient_of
from memlab.runtime.mechanisms import EarlyUpdates, SeenInCalls, brought
from memlab.runtime.workload import Workload
from memlab.session.in_force import InForce
from memlab.session.log import Log
from memlab.techniques.base import is_around_calls

_WITHOUT_CALL = "(it calls parts of it, its forward directly, or it within compiled code or a transform of torch.func)"


class Usage:
    """Use of the model by the loop."""

    def __init__(self, workload: Workload, in_force: InForce, log: Log) -> None:
        self._workload = workload
        self._in_force = in_force
        self._log = log
        self.begin()

    def begin(self, *, is_within_step: bool = False) -> None:
        """Begin with another loop; `is_within_step` if the model was called and its optimizer has not stepped yet."""
        # an update without a call may be that of a call in an earlier cell
        self._was_begun = is_within_step or any(gradient_of(p) is not None for p in self._workload.model.parameters())
        self._is_in_first_step = not self._was_begun
        self.ends_earlier_step = False  # whether the loop has made such an update
        self.was_called = False  # whether the loop has called the model to train it
        self._is_called = False  # whether it has done so since the last step
        self._was_updated_after = False  # whether a step has followed such a call
        self.was_evaluated = False  # whether it has called it in eval mode, with gradients
        self.failed_evaluation = 0  # `id` of the last error of such a call, or of one without gradients
        self.was_replicated = False  # whether it has called copies of it on several GPUs
        self.accumulates = False  # whether it makes several backward passes for a step
        self._gradient: object = None  # of one weight, at the first call since the last step
        self._stepped: set[int] = set()  # optimizers that have, before an update followed a call

    def called(self, *, is_within_step: bool) -> None:
        """Note a training call; gradients that have changed since an earlier one of the same step are added up."""
        self.was_called = self._is_called = True
        if self._in_force.plan.gradients is Gradients.RELEASE:
            return  # they come and go in the backward pass
        weight = next((p for p in self._workload.model.parameters() if p.requires_grad and p.is_leaf), None)
        gradient = None if weight is None or weight.grad is None else (id(weight.grad), weight.grad._version)
        if not is_within_step:
            self._gradient = gradient
        elif gradient is not None and gradient != self._gradient:
            self.accumulates = True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped; say what had no effect where it has stepped before."""
        self._was_updated_after |= self._is_called
        self._is_called = self._is_in_first_step = False
        if id(optimizer) in self._stepped:
            self.note()
        if not self._was_updated_after:
            if self._was_begun:
                self._was_begun, self.ends_earlier_step = False, True
            else:
                self._stepped.add(id(optimizer))

    def was_refused(self) -> None:
        """Take away what the backward pass of a first step has left, which memlab has refused."""
        if self._is_in_first_step:
            for parameter in self._workload.model.parameters():
                parameter.grad = None

    def note(self) -> None:
        """Write into the log which settings had no effect, once it is known that they had none."""
        if (passed_by := self.passed_by) is not None:
            self._log.note_once(passed_by)

    @property
    def is_passed_by(self) -> bool:
        """Return whether the model has been updated, and was not called before an update."""
        return bool(self._stepped) and not self._was_updated_after

    @property
    def how_passed_by(self) -> str:
        """Return in words how the loop trains the model without calls that settings work around."""
        how = "in eval mode only" if self.was_evaluated else f"without calling it {_WITHOUT_CALL}"
        if self.was_replicated:
            how = "by copies of it on several GPUs (DataParallel)"
        return f"the loop trains {self._workload.name} {how}"

    @property
    def passed_by(self) -> str | None:
        """Text for settings that work around calls or updates which the loop never makes; else None."""
        techniques = self._in_force.techniques
        if self.is_passed_by or not self.was_called:
            around = [t for t in techniques if is_around_calls(t) and self._stepped]
            idle = [t for t in around if not any(each.was_reached for each in brought([t], SeenInCalls))]
            why = self.how_passed_by
            advice = f"call {'model.train() before' if self.was_evaluated else 'the model itself, or name the part that it calls with --model'}"
        else:
            on_updates = [t for t in techniques if t.traits.is_of_optimizer or brought([t], EarlyUpdates)]
            idle = [] if self._workload.optimizers else on_updates
            why, advice = f"no optimizer updates {self._workload.name}", "train it with one of torch.optim"
        settings = (each for each in self._in_force.plan.settings() if any(t.wanted(each) for t in idle))
        return f"{reduce(Plan.joined, settings, Plan())} had no effect: {why}; {advice}" if idle else None
