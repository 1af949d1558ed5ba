"""`LiveModel`: the model that a control follows, held weakly, with what is known of training it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memlab.errors import MemlabError, WorkloadError
from memlab.runtime.workload import Workload
from memlab.session import Session, fit, session_of


class LiveModel:
    """A model, its session and its optimizers, none of them kept alive.

    Args:
        model: whose run it is.
        gone: called when the model is deleted, by whatever thread collects it.

    Attributes:
        name: of the model, as the notebook or its class has it.
        batch: what the model is called with, to measure and to predict with; None where it is not known yet.
        loss_fn: called as ``loss_fn(output, target)``; None when the model returns its own loss.
    """

    def __init__(self, model: nn.Module, gone: Callable[[], None]) -> None:
        self.name = type(model).__name__
        self.batch: Any = None
        self.loss_fn: Callable[..., torch.Tensor] | None = None
        self._gone = gone
        self._model = weakref.ref(model, self._forget)
        self._session: weakref.ref[Session] | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def is_gone(self) -> bool:
        """Return whether the model is deleted."""
        return self._model() is None

    @property
    def session(self) -> Session | None:
        """The session of the model, while it is attached."""
        session = self._session() if self._session is not None else None
        return session if session is not None and session.attached else None

    def follow(self, session: Session) -> None:
        """Take a session for the model's, and what it knows."""
        self._session = weakref.ref(session)
        self._optimizers = [weakref.ref(optimizer) for optimizer in session.workload.optimizers]
        self.loss_fn = self.loss_fn or session.workload.loss_fn
        self.batch = self.batch if self.batch is not None else session.workload.batch
        self.name = session.workload.name

    def optimizer_found(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer, for the session after this one."""
        self._optimizers.append(weakref.ref(optimizer))

    def attached(self) -> Session:
        """A session on the model, made if there is none."""
        model = self._alive()
        return session_of(model) or fit(Workload(model, self._live_optimizers(), name=self.name).held_weakly())

    def workload(self) -> Workload:
        """The live objects with the batch at hand.

        Raises:
            WorkloadError: there is none yet.
        """
        model, session = self._alive(), self.session
        if self.batch is None:
            raise WorkloadError(
                "no batch is known yet: run the cell that trains with %%memfit first, or name one, as in "
                "%memfit panel --batch NAME"
            )
        live = session.workload if session is not None else Workload(model, self._live_optimizers(), name=self.name)
        return Workload(model, live.optimizers, self.batch, self.loss_fn, live.scheduler, live.name)

    def _alive(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise MemlabError(f"{self.name} is deleted")
        return model

    def _live_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def _forget(self, _model: object) -> None:
        self.batch, self.loss_fn = None, None
        self._gone()
