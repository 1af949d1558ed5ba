"""`Models`: models and optimizers whose memory a ledger tells apart."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from memlab.measuring.holdings import Holding, gradients_of, inputs_of, parameters_of, state_of
from memlab.measuring.ledger import Ledger
from memlab.records import Category
from memlab.runtime.batch import Batch
from memlab.runtime.ownership import steps_some_of
from memlab.runtime.tree import tensors_in


class Models:
    """Models that train in one loop, with their optimizers."""

    def __init__(
        self,
        model: torch.nn.Module,  # the first
        optimizers: Iterable[torch.optim.Optimizer],  # those known so far
        # parts of parameters that techniques keep on the device at present, beside the model
        held: Callable[[], Iterable[torch.Tensor]],
        ledger: Ledger,  # records storages, and which of several models they are of
    ) -> None:
        self._refs = [weakref.ref(model)]  # by number; a loop may drop one, as that of a search does
        self.names: list[str] = []  # of the models, where there are several
        self._optimizers = [*map(weakref.ref, optimizers)]  # those known
        self._held = held
        self._ledger = ledger
        self._calling: list[int] = []  # numbers of the models whose calls are under way, from 1

    def __len__(self) -> int:
        return len(self._refs)

    @property
    def all(self) -> Sequence[torch.nn.Module]:
        """Return the models that are there, in the order in which they were found."""
        return [model for ref in self._refs if (model := ref()) is not None]

    def add(self, number: int, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Add a model, or put it in the place of one that the loop has dropped."""
        self._refs[number - 1 : number] = [weakref.ref(model)]
        self.names = list(names)
        trained = self.all
        self._optimizers = [
            weakref.ref(one) for one in self.optimizers if any(steps_some_of(one, each) for each in trained)
        ]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self.optimizers:
            self._optimizers.append(weakref.ref(optimizer))

    def forget(self) -> None:
        """Let go of models and optimizers."""
        self._refs, self._optimizers = [], []

    # -- calls ---------------------------------------------------------------------------------

    def call_begins(self, number: int, batch: Batch, *, is_observed: bool) -> None:
        """Note that a model of this number is called: what is born from now on is its own."""
        self._calling.append(number)
        self._ledger.owner = number
        if is_observed:
            self._ledger.know(inputs_of(batch))
            self._ledger.belong(number, (tensor for _, tensor in inputs_of(batch)))

    def call_ended(self) -> None:
        """Note that the innermost call is over; harmless when none is under way."""
        del self._calling[-1:]
        self._ledger.owner = self._calling[-1] if self._calling else 0

    def interrupted(self) -> None:
        """Note that no call is under way any more."""
        self._calling, self._ledger.owner = [], 0

    # -- memory --------------------------------------------------------------------------------

    def claim(self) -> None:
        """Say which of several models parameters, gradients and optimizer state are of."""
        if len(self) < 2:
            return
        states = {id(p): state for o in self.optimizers for p, state in o.state.items()}
        for number, ref in enumerate(self._refs, 1):
            model = ref()
            if model is None:
                continue
            held = (t for of in (parameters_of(model), gradients_of(model)) for _, t in of)
            self._ledger.belong(number, held)
            self._ledger.belong(number, (t for p in model.parameters() for t in tensors_in(states.get(id(p), ()))))

    def parameters(self) -> Iterator[Holding]:
        """Yield parameters and buffers, and what techniques keep of them."""
        for model in self.all:
            yield from parameters_of(model)
        if self.all:
            yield from ((Category.PARAMETERS, tensor) for tensor in self._held())

    def gradients(self) -> Iterator[Holding]:
        for model in self.all:
            yield from gradients_of(model)

    def state(self) -> Iterator[Holding]:
        return state_of(self.optimizers)
