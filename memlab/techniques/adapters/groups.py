"""Groups of an optimizer in which adapters have the places of the weights they are beside."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memlab.runtime.ownership import stepped_by
from memlab.techniques.adapters.waiting import Waiting

Optimizer = torch.optim.Optimizer
Parameter = nn.Parameter


class ExchangedGroups:
    """The groups of one optimizer, which remain the same dicts, with other lists of parameters; and its state.

    Args:
        optimizer: whose.
        frozen: parameters that do not train meanwhile, by id.
        adapters: those beside each of these, by its id.
        placed: ids of adapters that another optimizer has.
        waiting: where state of what is frozen goes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        frozen: Mapping[int, Parameter],
        adapters: Mapping[int, Sequence[Parameter]],
        placed: Collection[int],
        waiting: Waiting,
    ) -> None:
        self._frozen, self._adapters, self._waiting = frozen, adapters, waiting
        self._order = [*optimizer.state]  # of its entries
        known = stepped_by(optimizer).union(placed)
        # by id: the group, the list it had and the one it has
        self._lists: dict[int, tuple[dict[str, Any], list[Any], list[Any]]] = {}
        for group in optimizer.param_groups:
            new: list[Any] = []
            for parameter in group["params"]:
                if id(parameter) in frozen:
                    new += [each for each in adapters.get(id(parameter), ()) if id(each) not in known]
                else:
                    new.append(parameter)
            self._lists[id(group)] = group, group["params"], new
            group["params"] = new
        waiting.take_state(optimizer, [p for p in frozen.values() if p in optimizer.state])

    def as_written(self, group: Mapping[str, Any]) -> list[Any]:
        """Return the parameters that a group has without adapters: the list it had, where the loop has not changed it since."""
        now = group["params"]
        _, own, new = self._lists.get(id(group), (group, now, now))
        mine = {id(p) for beside in self._adapters.values() for p in beside}
        remaining, known = {id(p) for p in now}, {id(p) for p in new}
        if remaining == known and mine.isdisjoint(map(id, own)):
            return own
        weights = {
            id(p): self._frozen[key] for key, beside in self._adapters.items() if key in self._frozen for p in beside
        }
        kept = [p for p in own if id(p) in remaining or id(p) not in known]
        written = (weights.get(id(p), p) for p in [*kept, *(p for p in now if id(p) not in known)])
        return list({id(p): p for p in written}.values())

    def give_back(self, optimizer: Optimizer) -> None:
        """Put back the lists, and the entries of state in the order they had."""
        for group, parameters in [(group, self.as_written(group)) for group in optimizer.param_groups]:
            group["params"] = parameters
        self._waiting.give_state_back(optimizer, [*self._frozen.values()])
        known = {id(key) for key in self._order}
        entries = optimizer.state
        for key in [
            *(each for each in self._order if each in entries),
            *(each for each in entries if id(each) not in known),
        ]:
            entries[key] = entries.pop(key)
