"""Layers of optimizer state: techniques that keep it in another form, one over the other.

Rules:

1. Layers are exchanged one parameter at a time. Until all are, the old form is kept, here by reference or by the
   caller in its own way, so that going back converts nothing and is bit for bit.
2. Checkpoints are in the user's own format: leaving unpacks, loading packs, and live state is not touched.
3. Torch hands out the live tensors in `state_dict()`, and takes those it is given in `load_state_dict()`. So tensors that were
   handed out or taken in follow the state after each step, for as long as the loop holds them and the state goes on.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memlab.runtime.away import sent_away
from memlab.runtime.dispatch import never_compile
from memlab.runtime.interrupts import deferred_interrupts
from memlab.runtime.mechanisms import Bringing, StateForm, Visiting, brought
from memlab.runtime.out_of_memory import is_out_of_memory, with_room
from memlab.runtime.ownership import parameters_in
from memlab.runtime.stand_ins import is_ours
from memlab.runtime.state_entries import (
    Followed,
    Optimizer,
    PackedState,
    Parameter,
    State,
    changing,
    followed_of,
    forget_dropped,
    held_of,
    held_states,
    kept_of,
    set_state,
)

_Mapping = Callable[[Optimizer, Parameter, State], State]
Exchanged = Callable[[], None]

SMALL_ELEMENTS = 1024  # below this a copy costs a kernel launch and no memory


def shown(
    resident: State,  # what is kept
    names: frozenset[str],  # those of the user's own form
    optimizer: Optimizer,
    parameter: Parameter,
    techniques: Callable[[], Sequence[Bringing] | None],  # a method; what it gives is None while an update is under way
    why: str,  # in words, where a name is gone
) -> PackedState:
    """Return state as the loop may find it, which keeps nothing alive."""
    method, of, owner = weakref.WeakMethod(techniques), weakref.ref(parameter), weakref.ref(optimizer)

    def own_form(state: State) -> State | None:
        asked, parameter, optimizer = method(), of(), owner()
        layers = None if asked is None else asked()
        if layers is None or parameter is None or optimizer is None:
            return None
        try:
            return canonical(optimizer, parameter, state, layers)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None  # as there would not be without memlab: it is read as it is kept

    return PackedState(resident, names, own_form, why, changing(optimizer))


def _follow(optimizer: Optimizer, parameter: torch.Tensor, tensors: State) -> None:
    """Let tensors in the user's own form have the values of a parameter's state from now on."""
    state = optimizer.state[parameter]
    live = {id(value) for value in kept_of(state).values()}
    new = [
        (name, weakref.ref(value))
        for name, value in tensors.items()
        if torch.is_tensor(value) and id(value) not in live
    ]
    followed = followed_of.setdefault(optimizer, {})
    before = followed.get(id(parameter))
    known = before.tensors if before is not None and before.current is state else []
    followed[id(parameter)] = Followed(state, known + new)


def _catch_up(optimizer: Optimizer, techniques: Sequence[Bringing]) -> None:
    """Give tensors that follow the state its values."""
    before = followed_of.pop(optimizer, {})
    after = {}
    for parameter, state in held_states(optimizer) if before else ():
        followed = before.get(id(parameter))
        if followed is None or followed.current is not state:
            continue
        alive = [(name, tensor) for name, reference in followed.tensors if (tensor := reference()) is not None]
        if not alive:
            continue
        after[id(parameter)] = Followed(state, [(name, weakref.ref(tensor)) for name, tensor in alive])
        own = canonical(optimizer, parameter, state, techniques)
        for name, tensor in alive:
            value = own.get(name)
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape:
                # one that was made in inference mode can be written to there alone
                with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(value)
    if after:
        followed_of[optimizer] = after


def at_home(techniques: Sequence[Bringing], parameters: Sequence[Parameter], *, updates: bool) -> ExitStack:
    """Context in which parameters are on the device they are used on, whatever techniques keep them elsewhere."""
    with ExitStack() as visiting:
        for each in brought(techniques, Visiting):
            visiting.enter_context(each.at_home(parameters, updates=updates))
        return visiting.pop_all()


def packed(optimizer: Optimizer, parameter: Parameter, state: State, layers: Sequence[StateForm]) -> State:
    """State of one parameter, put through layers from the bottom up."""
    for form in layers:
        below, state = state, form.pack_state(optimizer, parameter, state)
        if isinstance(below, PackedState) and not isinstance(state, PackedState):
            state = below.around(state)
    return state


def unpacked(optimizer: Optimizer, parameter: Parameter, state: State, layers: Sequence[StateForm]) -> State:
    """State of one parameter, brought back through layers from the top down."""
    for form in reversed(layers):
        state = form.unpack_state(optimizer, parameter, state)
    return state


def canonical(optimizer: Optimizer, parameter: Parameter, state: State, techniques: Sequence[Bringing]) -> State:
    """State of one parameter in the user's own form; nothing live is touched."""
    layers = brought(techniques, StateForm)
    # training goes on with what is made here
    with torch.inference_mode(mode=False), torch.no_grad(), at_home(techniques, [parameter], updates=False):
        return unpacked(optimizer, parameter, state, layers)


def pack_again(optimizer: Optimizer, parameter: Parameter, techniques: Sequence[Bringing]) -> None:
    """Pack state that the loop has asked for: what it only read becomes, bit for bit, what was kept."""
    state = optimizer.state.get(parameter)
    if not isinstance(state, PackedState) or state.closed is None:
        return
    layers = brought(techniques, StateForm)
    now, before = kept_of(state), unpacked(optimizer, parameter, kept_of(state.closed), layers)
    is_read = now.keys() == before.keys() and all(_same(now[name], value) for name, value in before.items())
    # one that the loop has emptied begins anew
    again = state.closed if is_read else packed(optimizer, parameter, now, layers) if now else {}
    set_state(optimizer, parameter, again)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one is other or one == other)
    return one.dtype is other.dtype and one.device == other.device and torch.equal(one, other)


def apply_layer(
    optimizer: Optimizer,  # whose state is packed, one parameter at a time
    form: StateForm,  # the layer to put in
    above: Sequence[StateForm] = (),  # state layers that are in force above it, from the bottom up
    # called after each parameter. Who gives it keeps the old state and puts it back when this raises; else that is done
    # here
    exchanged: Exchanged | None = None,
    # all techniques that are on the workload: they say where parameters are meanwhile
    in_force: Sequence[Bringing] = (),
) -> None:
    """Pack all state of an optimizer into one more form."""
    _exchange(optimizer, form.pack_state, above, exchanged, in_force)


def remove_layer(
    optimizer: Optimizer,
    form: StateForm,
    above: Sequence[StateForm] = (),
    exchanged: Exchanged | None = None,
    in_force: Sequence[Bringing] = (),
) -> None:
    """Take one form out of all state of an optimizer; the opposite of `apply_layer`."""
    _exchange(optimizer, form.unpack_state, above, exchanged, in_force)


class _Coming(dict[tuple[int, str], torch.Tensor]):
    """Tensors of a state dict that is loaded, by `id` of the parameter and name; torch holds it as long as it loads."""


# torch makes all copies on the device before it hands any of them over, and so would need the memory that the layers save
_coming: MutableMapping[Optimizer, weakref.ref[_Coming]] = WeakIdKeyDictionary()


def _have_wait(optimizer: Any, state_dict: dict[str, Any], techniques: Sequence[Bringing]) -> dict[str, Any] | None:
    """Return the state dict with empty tensors in place of large ones (for a load_state_dict pre-hook); None where others would see them.

    Torch gives these the dtype and the device that it would give the others.
    """
    hooks = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
    is_seen = not all(is_ours(hook) for each in hooks for hook in each.values())
    is_torchs = type(optimizer).__setstate__.__module__.startswith("torch.")
    if is_seen or not is_torchs or not brought(techniques, StateForm):
        return None
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    own = parameters_in(optimizer)
    known, entries, coming = dict(zip(numbers, own, strict=False)), {**state_dict["state"]}, _Coming()
    for number, parameter in known.items():
        entry = entries.get(number)
        if isinstance(entry, dict):
            large = {name: value for name, value in entry.items() if _is_large(value)}
            coming.update({(id(parameter), name): value for name, value in large.items()})
            entries[number] = {**entry, **{name: value.new_empty(0) for name, value in large.items()}}
    _coming[optimizer] = weakref.ref(coming)
    return {**state_dict, "state": entries, "coming": coming}


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel() >= SMALL_ELEMENTS


def pack_loaded(optimizer: Optimizer, techniques: Sequence[Bringing]) -> None:
    """Pack state that was just loaded in the user's own format (a load_state_dict post-hook)."""
    layers = brought(techniques, StateForm)
    held_of.pop(optimizer, None)  # in torch, too, entries are others once a state dict was loaded
    reference = _coming.pop(optimizer, None)
    coming = (reference() if reference is not None else None) or _Coming()
    loaded = held_states(optimizer)
    try:
        while loaded:
            with_room(partial(_pack_loaded_one, optimizer, *loaded[0], coming, techniques, layers))
            del loaded[0]
    finally:
        for parameter, state in loaded:  # of a load that broke off, and may be repeated
            state.update({name: coming.get((id(parameter), name), value) for name, value in state.items()})


def _pack_loaded_one(
    optimizer: Optimizer,
    parameter: Any,
    state: State,
    coming: Mapping[tuple[int, str], torch.Tensor],
    techniques: Sequence[Bringing],
    layers: Sequence[StateForm],
) -> None:
    state = dict(state)
    for name, value in state.items():
        if (whole := coming.get((id(parameter), name))) is not None:
            state[name] = whole.to(dtype=value.dtype, device=value.device)
    with at_home(techniques, [parameter], updates=False), changing(optimizer):
        set_state(optimizer, parameter, packed(optimizer, parameter, state, layers))
    if layers and parameter in optimizer.state:
        _follow(optimizer, parameter, state)


def canonical_state_dict(
    optimizer: Optimizer, state_dict: dict[str, Any], techniques: Sequence[Bringing]
) -> dict[str, Any]:
    """A state_dict in the user's own format (for a state_dict post-hook); live state is not touched.

    State that a layer changed is made one parameter at a time and, when the parameter is on an
    accelerator, kept in host memory: a checkpoint must not need the memory the layers save.
    """
    if not brought(techniques, StateForm):
        return state_dict
    everything = [*parameters_in(optimizer)]

    def parameter_of(key: Any) -> Any:
        return everything[key] if type(key) is int else None

    with changing(optimizer):
        # another thread may have exchanged entries since torch gathered them
        resident = {k: optimizer.state.get(parameter_of(k), entry) for k, entry in state_dict["state"].items()}
        entries = _canonical_entries(optimizer, resident, parameter_of, techniques)
        own = {key: _on_host(entry, resident[key]) for key, entry in entries}
        for key, entry in own.items():
            if type(key) is int and isinstance(entry, dict):
                _follow(optimizer, everything[key], entry)
    return {**state_dict, "state": own}


class _StateOfCopies:
    """Stands for `__getstate__` of an optimizer; its class's own leaves it out of what is copied, as this does for others."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        # what brings the state into the user's own format, one for each session
        self.forms: list[Callable[[Optimizer, dict[str, Any]], dict[str, Any]]] = []

    def __call__(self) -> Any:
        optimizer: Any = self._optimizer()
        kind: Any = type(optimizer)
        state = kind.__getstate__(optimizer)
        if not isinstance(state, dict):
            return state
        state = {key: value for key, value in state.items() if value is not self}
        for form in self.forms:
            state = form(optimizer, state)
        return state


def show_own_form(
    optimizer: Optimizer, techniques: Callable[[], Sequence[Bringing]], is_led: Callable[[], bool], undo: ExitStack
) -> None:
    """Save, load, copy and pickle an optimizer's state in the user's own form, until undone.

    Args:
        optimizer: whose state.
        techniques: those that are on it now.
        is_led: whether another session sees to its state now.
        undo: takes the hooks out again.
    """
    undo.callback(
        optimizer.register_state_dict_post_hook(
            lambda saved, state_dict: canonical_state_dict(saved, state_dict, techniques())
        ).remove
    )
    undo.callback(
        optimizer.register_load_state_dict_pre_hook(
            lambda loading, state_dict: _have_wait(loading, state_dict, techniques())
        ).remove
    )
    undo.callback(optimizer.register_load_state_dict_post_hook(lambda loaded: pack_loaded(loaded, techniques())).remove)

    @never_compile
    def stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if held_of.get(optimizer):
            forget_dropped(optimizer)
        if followed_of.get(optimizer) and not is_led():
            _catch_up(optimizer, techniques())

    undo.callback(optimizer.register_step_post_hook(stepped).remove)
    _keep_own_form_in_copies(optimizer, lambda copied, state: canonical_copy(copied, state, techniques()), undo)


def _keep_own_form_in_copies(
    optimizer: Optimizer, form: Callable[[Optimizer, dict[str, Any]], dict[str, Any]], undo: ExitStack
) -> None:
    """Give copies and pickles of an optimizer the state that it would have without memlab, until undone."""
    own = vars(optimizer)
    made = own.get("__getstate__")
    if not isinstance(made, _StateOfCopies):
        made = own["__getstate__"] = _StateOfCopies(optimizer)
    made.forms.append(form)

    def restore() -> None:
        made.forms.remove(form)
        if not made.forms:
            own.pop("__getstate__", None)

    undo.callback(restore)


def canonical_copy(optimizer: Optimizer, copied: dict[str, Any], techniques: Sequence[Bringing]) -> dict[str, Any]:
    """Return what a copy or a pickle of an optimizer holds, in the user's own format; live state is not touched."""
    resident = copied.get("state")
    if not isinstance(resident, dict) or not brought(techniques, StateForm):
        return copied
    # the copy trains by itself, so its state stays where the parameter is
    entries = _canonical_entries(
        optimizer, resident, lambda key: key if isinstance(key, torch.Tensor) else None, techniques
    )
    return {**copied, "state": defaultdict(dict, entries)}


def _canonical_entries(
    optimizer: Optimizer,
    entries: Mapping[Any, Any],
    parameter_of: Callable[[Any], Any],
    techniques: Sequence[Bringing],
) -> Iterator[tuple[Any, Any]]:
    """Yield state in the user's own format, by key: made one parameter at a time; no entry for one that has none.

    For `parameter_of` a key stands for a parameter, or, as None, for something else that an optimizer keeps there.
    """
    for key, entry in entries.items():
        parameter = parameter_of(key)
        if parameter is None or not isinstance(entry, dict) or not entry:
            yield key, entry
        elif own := with_room(partial(canonical, optimizer, parameter, entry, techniques)):
            yield key, own


def _on_host(entry: Any, live: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {name: _on_host_unless_live(value, live) for name, value in entry.items()}


def _on_host_unless_live(value: Any, live: Mapping[str, Any]) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel() < SMALL_ELEMENTS:
        return value
    return value if any(value is kept for kept in live.values()) else sent_away(value)


def _exchange(
    optimizer: Optimizer,
    there: _Mapping,
    above: Sequence[StateForm],
    exchanged: Exchanged | None,
    in_force: Sequence[Bringing],
) -> None:
    held = held_states(optimizer)
    before = held if exchanged is None else []
    try:
        for parameter, _ in held:
            with at_home(in_force, [parameter], updates=False), changing(optimizer):
                _exchange_one(optimizer, parameter, there, above)
            if exchanged is not None:
                exchanged()
    except BaseException:
        optimizer.state.update(before)
        raise


def _exchange_one(optimizer: Optimizer, parameter: Parameter, there: _Mapping, above: Sequence[StateForm]) -> None:
    state = optimizer.state.get(parameter)
    if state:
        bare = unpacked(optimizer, parameter, state, above)
        changed = there(optimizer, parameter, bare)
        set_state(optimizer, parameter, packed(optimizer, parameter, changed, above) if changed else changed)


def order_state(optimizer: Optimizer, known: int) -> None:
    """Have entries after the first `known` in the order of the groups, in which a step of the loop's makes them."""
    made = [*optimizer.state][known:]
    of_groups = parameters_in(optimizer)
    places = {id(parameter): place for place, parameter in enumerate(of_groups)}
    with deferred_interrupts():
        for key in sorted(made, key=lambda each: places.get(id(each), len(places))):
            optimizer.state[key] = optimizer.state.pop(key)
