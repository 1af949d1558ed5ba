"""`Observer`: who watches a session."""

from __future__ import annotations

import torch

from memlab.errors import MemlabError
from memlab.plan import Plan
from memlab.runtime.batch import Batch


class Observer:
    """Observer of a session, called on the training thread; derive from it and override what you need."""

    def plan_changed(self, plan: Plan) -> None:
        """A plan has come into force."""

    def plan_asked(self, plan: Plan) -> None:
        """A plan waits for the next step boundary, or the one in force is to stay; told on the thread that asks."""

    def plan_refused(self, plan: Plan, refusal: MemlabError) -> None:
        """A plan that waited for a step boundary does not apply; the one before stays in force."""

    def refused(self, refusal: MemlabError) -> None:
        """A refusal is about to be raised in the loop's own code or a backward pass, and the loop may catch it."""

    def refusal_handled(self) -> None:
        """The last refusal ends nothing: the same work is done again under another plan."""

    def step_boundary(self) -> None:
        """A step is about to begin; the plan changes after this. What is raised here ends the loop between two steps."""

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """The session has taken over an optimizer."""

    def forward_begins(self, batch: Batch) -> None:
        """A training forward of the model is about to run."""

    def forward_ended(self, loss: torch.Tensor | None) -> None:
        """The model has run, and returned this loss."""

    def evaluation_begins(self, batch: Batch) -> None:
        """A call of the model without gradients is about to run."""

    def evaluation_ended(self) -> None:
        """A call without gradients is over, or has raised."""

    def gradients_complete(self) -> None:
        """Gradients are complete in the middle of a backward pass; their parameters are updated next, and they go."""

    def only_tried(self) -> None:
        """Note that what was allocated since the step began was a trial: no step of the plan needs it again."""

    def only_watched(self) -> None:
        """Note that steps so far are none of the plan's: in them the loop was only watched under it."""

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """An engine has given memory to a storage, or taken it away, without an operator."""

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def step_ended(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        """The optimizer has stepped, or left its parameters alone."""

    def rested(self, steps: int) -> None:
        """Steps have passed of which nobody was told; see `Session.rest`."""

    def interrupted(self) -> None:
        """A forward or a step has raised."""
