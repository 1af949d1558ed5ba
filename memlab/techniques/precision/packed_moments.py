"""`PackedMoments`: moments of an optimizer in bf16, rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memlab.runtime.buckets import is_separable
from memlab.runtime.mechanisms import OwnMemory, StateForm, Updating
from memlab.runtime.state_entries import PackedState, State, held_states, kept_of
from memlab.runtime.state_layers import shown
from memlab.techniques.base import Technique
from memlab.techniques.offload.spill import ParkedStates
from memlab.techniques.precision.moments import round_stochastically

Optimizer = torch.optim.Optimizer


class PackedMoments(StateForm, Updating, OwnMemory):
    """Packs the state of one parameter at a time; what is new in moments is rounded at random."""

    state_per_step = True
    draws_in_update = True

    def __init__(self, note: Callable[[str], None], techniques: Callable[[], Sequence[Technique]]) -> None:
        self._note = note  # told what is left as it is
        self._techniques = techniques  # those in force
        self._generators: dict[torch.device, torch.Generator] = {}
        # within a step: what a bucket's moments were packed in before, which they are again, so that they stay where they are
        self._is_stepping = False
        self._packed: dict[int, State] = {}
        self._own: set[tuple[int, str]] = set()  # what optimizers keep in bf16 by themselves
        # as it was before it was rounded, until the next update; two optimizers may hold one parameter
        self._parked: MutableMapping[Optimizer, ParkedStates] = WeakIdKeyDictionary()

    @property
    def host_bytes(self) -> int:
        """Bytes that are kept off the device."""
        return sum(parked.stored_bytes for parked in self._parked.values())

    def expect(self, optimizer: Optimizer) -> None:
        """Note what an optimizer keeps in bf16 by itself, before anything of it is packed."""
        for parameter, state in held_states(optimizer):
            self._note_own(parameter, state, but={})

    def pack_state(self, optimizer: Optimizer, parameter: nn.Parameter, state: State) -> State:
        if not is_separable(optimizer):
            self._note(
                f"{type(optimizer).__name__} is not of torch: what it keeps is left as it is, since it may not be moments"
            )
            return state
        before = self._packed.get(id(parameter), {})
        if self._is_stepping:
            self._note_own(parameter, state, but=before)
        resident = {key: self._packed_moment(parameter, value, before.get(key)) for key, value in state.items()}
        names = frozenset(key for key, value in state.items() if resident[key] is not value)
        if names and not self._is_stepping:
            parked = self._parked.setdefault(optimizer, ParkedStates())
            parked.park(parameter, {key: state[key] for key in names})
        if not names or isinstance(state, PackedState):
            return resident
        return shown(resident, names, optimizer, parameter, self._layers_at_rest, "under --precision pure-bf16")

    def _layers_at_rest(self) -> Sequence[Technique] | None:
        return None if self._is_stepping else self._techniques()

    def unpack_state(self, optimizer: Optimizer, parameter: nn.Parameter, state: State) -> State:
        if not is_separable(optimizer):
            return state
        if self._is_stepping:
            resident = kept_of(optimizer.state.get(parameter, {}))
            self._packed[id(parameter)] = {key: value for key, value in state.items() if value is resident.get(key)}
        before = None if self._is_stepping else self._parked.get(optimizer)
        parked = {} if before is None else before.of(parameter) or {}
        return {
            key: parked[key] if key in parked else self._unpacked(parameter, key, value) for key, value in state.items()
        }

    def _unpacked(self, parameter: torch.Tensor, key: str, value: Any) -> Any:
        is_ours = _is_moment(parameter, value, torch.bfloat16) and (id(parameter), key) not in self._own
        return value.float() if is_ours else value

    def bucket_coming(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._is_stepping = True

    def bucket_updated(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._packed.clear()
        parked = self._parked.get(optimizer)
        if parked:
            for parameter in parameters:
                parked.drop(parameter)

    def buckets_over(self, optimizer: Optimizer) -> None:
        self._is_stepping = False
        self._packed.clear()

    def _note_own(self, parameter: torch.Tensor, state: State, but: State) -> None:
        own = (key for key, value in state.items() if _is_moment(parameter, value, torch.bfloat16))
        self._own |= {(id(parameter), key) for key in own if key not in but}

    def _packed_moment(self, parameter: torch.Tensor, value: Any, before: torch.Tensor | None) -> Any:
        if not _is_moment(parameter, value, torch.float32):
            return value
        into = before if _is_moment(parameter, before, torch.bfloat16) else None
        return round_stochastically(value, self._generator(value.device), into)

    def _generator(self, device: torch.device) -> torch.Generator:
        # a generator of its own: the user's random numbers stay what they were
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]


def _is_moment(parameter: torch.Tensor, value: Any, dtype: torch.dtype) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.dtype is dtype and value.shape == parameter.shape and value.dim() > 0
    )
