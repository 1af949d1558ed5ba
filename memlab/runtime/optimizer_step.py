"""One step of an optimizer in buckets of parameters, while the user's optimizer stays the same object.

Rules:

1. It is made in the place of the optimizer's own (`memlab.runtime.plain_step.take_over`).
2. Parameters are updated in buckets, so unpacked state and backups are bounded by the size of a
   bucket (or of one parameter that is larger) and not by the size of the model.
3. A bucket is updated or it is not. When its update raises, parameters and state become what they
   were before it: packed state through references kept until the bucket has succeeded, tensors that
   are updated in place through a backup, entries created in the failed update by dropping them.
   Buckets finished earlier stay updated; `done` names them, so that a retry does not count them twice.
4. Once a bucket is updated its state is packed again, whatever interrupts that.
5. Optimizers whose update is not known to treat parameters one by one run their own `step`, once and whole, on
   state that is unpacked before it and packed after it (`OwnStep`): a class of the user's own may count its steps,
   return something, or not cope with a stand-in that has no parameters.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch

from memlab.runtime.buckets import bucket_bytes_for, buckets, share_of, size_of, with_gradient
from memlab.runtime.interrupts import Caller, deferred_interrupts
from memlab.runtime.mechanisms import Bringing, StateForm, Stepper, Updating, Visiting, brought
from memlab.runtime.ownership import parameters_in
from memlab.runtime.plain_step import plain_stepper
from memlab.runtime.state_entries import Optimizer, Parameter, changing, kept_of, restored, set_state
from memlab.runtime.state_layers import SMALL_ELEMENTS, at_home, pack_again, packed, unpacked

Copy = Callable[[torch.Tensor], torch.Tensor]
Protection = Callable[[Sequence[Parameter]], Copy | None]


def run_step(
    optimizer: Optimizer,
    techniques: Sequence[Bringing],  # those in force, in the order in which state was packed
    # size of a bucket, counted as the fp32 moments of its parameters; None for what is small beside the model
    # (`bucket_bytes_for`)
    bucket_bytes: int | None = None,
    *,
    # keep a copy of the parameters and in-place state of the bucket being updated, so that an exception in the middle
    # of it undoes it; none of one parameter that one kernel updates. Without, only packed state and state created in the
    # failed update are put right. A function decides for each bucket before it begins: it returns what copies a tensor, or
    # None for no copies
    backup: bool | Protection = True,
    # parameters that are updated already and left out; finished buckets are added to it. A caller that frees memory
    # after an out-of-memory error calls again with the same set
    done: set[Parameter] | None = None,
    largest_first: bool = False,  # so that what has room for the first bucket has it for the others
) -> bool:
    """Update every parameter that has a gradient, bucket by bucket.

    Returns:
        False when a gradient scaler told the optimizer to skip this step, else True.
    """
    foreign = foreign_stepper(optimizer, techniques)
    if foreign is not None and not _serve_scaler(optimizer):
        return False
    stepper = foreign or plain_stepper(optimizer)
    layers = _layers_to_open(techniques)

    def protection(bucket: Sequence[Parameter]) -> Copy | None:
        if callable(backup):
            return backup(bucket)
        is_at_once = len(bucket) == 1 and getattr(stepper, "is_one_kernel", False)
        return cloned if backup and not is_at_once else None

    finished: set[Parameter] = set() if done is None else done
    bucket_bytes = bucket_bytes_for(optimizer, techniques) if bucket_bytes is None else bucket_bytes
    if layers and not any(map(optimizer.state.get, with_gradient(optimizer))):
        # a first update makes the state where it updates, and it goes away with its bucket
        bucket_bytes = min(bucket_bytes, share_of(optimizer))
    parts: Iterable[list[Parameter]] = buckets(optimizer, bucket_bytes)
    if largest_first:
        parts = sorted(parts, key=lambda bucket: sum(map(size_of, bucket)), reverse=True)
    waiting = ([p for p in bucket if p not in finished] for bucket in parts)
    with _announced(optimizer, filter(None, waiting), techniques) as announced:
        for bucket in announced:
            copy = None if getattr(stepper, "is_atomic", False) else protection(bucket)
            with at_home(techniques, bucket, updates=True), changing(optimizer):
                with _updating(optimizer, bucket, techniques, copy):
                    stepper(bucket)
                finished.update(bucket)
                _close_all(optimizer, bucket, layers)
            for each in brought(techniques, Updating):
                each.bucket_updated(optimizer, bucket)
    return True


@contextmanager
def _announced(
    optimizer: Optimizer, buckets: Iterator[list[Parameter]], techniques: Sequence[Bringing]
) -> Iterator[Iterator[list[Parameter]]]:
    """The buckets, each of them announced to the techniques before the one in front of it is updated."""
    try:
        yield _one_ahead(optimizer, buckets, techniques)
    finally:
        for each in brought(techniques, Updating):
            each.buckets_over(optimizer)


def _one_ahead(
    optimizer: Optimizer, buckets: Iterator[list[Parameter]], techniques: Sequence[Bringing]
) -> Iterator[list[Parameter]]:
    before: list[Parameter] = []
    for bucket in buckets:
        for each in brought(techniques, Updating):
            each.bucket_coming(optimizer, bucket)
        if before:
            yield before
        before = bucket
    if before:
        yield before


def update(optimizer: Optimizer, parameters: Sequence[Parameter], techniques: Sequence[Bringing]) -> None:
    """Update some parameters now, as one bucket without copies, and leave the others to the step.

    Example:
        >>> one, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> one.grad = other.grad = torch.ones(1)
        >>> update(torch.optim.SGD([one, other], lr=0.5), [one], [])
        >>> one.item(), other.item()
        (0.5, 1.0)
    """
    foreign = foreign_stepper(optimizer, techniques)
    stepper = foreign or plain_stepper(optimizer)
    with _announced(optimizer, iter([list(parameters)]), techniques) as announced:
        for bucket in announced:
            with at_home(techniques, bucket, updates=True), changing(optimizer):
                with _updating(optimizer, bucket, techniques, None):
                    stepper(bucket)
                _close_all(optimizer, bucket, _layers_to_open(techniques))
    if foreign is not None:
        # kernels that torch does not know write past its counters, and autograd must see that weights are others now
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor beside it."""
    return tensor.detach().clone()


def foreign_stepper(optimizer: Optimizer, techniques: Sequence[Bringing]) -> Stepper | None:
    """Return what updates parameters in place of the user's optimizer: that of the last technique which has one."""
    steppers = (each.stepper(optimizer) for each in reversed(brought(techniques, Updating)))
    return next((stepper for stepper in steppers if stepper is not None), None)


def is_changed(optimizer: Optimizer, techniques: Sequence[Bringing]) -> bool:
    """Return whether an update is another than the user's own, in state, in places or in what makes it."""
    has_form, visits = bool(brought(techniques, StateForm)), bool(brought(techniques, Visiting))
    return has_form or visits or foreign_stepper(optimizer, techniques) is not None


def _serve_scaler(optimizer: Optimizer) -> bool:
    """Do what a fused optimizer does inside its kernel: skip on overflow, otherwise unscale.

    `GradScaler` leaves `found_inf` and `grad_scale` on optimizers that promise to handle them.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and bool(found_inf):
        return False
    if scale is not None:
        for parameter in with_gradient(optimizer):
            assert parameter.grad is not None
            parameter.grad.div_(scale.to(parameter.grad.device))
        # gradients are true now; a retry must not divide again, and the scaler deletes the attribute itself
        optimizer.grad_scale = torch.ones_like(scale)  # type: ignore[attr-defined]
    return True


_open_steps: weakref.WeakSet[OwnStep] = weakref.WeakSet()


@functools.cache
def _close_open_steps_at_exit() -> None:
    # one that raised and was forgotten would put parameters back while the interpreter takes them apart, which torch aborts at
    atexit.register(_close_open_steps)


def _close_open_steps() -> None:
    for step in tuple(_open_steps):
        step.close()


class OwnStep:
    """A step that an optimizer makes itself, between two hooks, with state and parameters as it knows them.

    Args:
        optimizer: the user's.
        techniques: those in force, in the order in which state was packed.
        call: the frame of the hooked call. A step that raises comes to no second hook; whether a later call lies within
            this one is told by its frame.
    """

    def __init__(self, optimizer: Optimizer, techniques: Sequence[Bringing], call: FrameType) -> None:
        self.optimizer = optimizer
        self._call = Caller(call)
        self._open = ExitStack()
        self._inner = 0
        _close_open_steps_at_exit()
        _open_steps.add(self)
        with deferred_interrupts():
            self._open.enter_context(_opened(optimizer, techniques))

    def is_around(self, frame: FrameType) -> bool:
        """Return whether a frame is within the step."""
        return not self._call.is_over(frame)

    def inner_begins(self) -> None:
        """A class above calls the step of the one below, which runs the hooks again."""
        self._inner += 1

    def ended(self) -> bool:
        """Return whether the hook after a step is that of the whole step; if so, close."""
        self._inner -= 1
        if self._inner >= 0:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Pack state again."""
        with deferred_interrupts():
            self._open.close()
        _open_steps.discard(self)


@contextmanager
def _opened(optimizer: Optimizer, techniques: Sequence[Bringing]) -> Iterator[None]:
    """All state and parameters of an optimizer as its own step expects them."""
    everything = [*parameters_in(optimizer)]
    with _announced(optimizer, iter([everything]), techniques) as announced:
        for bucket in announced:
            with at_home(techniques, bucket, updates=True):
                # not locked meanwhile: a step that raises stays open, and who closes it may be another thread
                with _updating(optimizer, bucket, techniques, None):
                    yield
                with changing(optimizer):
                    _close_all(optimizer, bucket, _layers_to_open(techniques))
            for each in brought(techniques, Updating):
                each.bucket_updated(optimizer, bucket)


@contextmanager
def _updating(
    optimizer: Optimizer, bucket: Sequence[Parameter], techniques: Sequence[Bringing], copy: Copy | None
) -> Iterator[None]:
    layers = _layers_to_open(techniques)
    with changing(optimizer):
        for parameter in bucket:
            pack_again(optimizer, parameter, techniques)
        before = _Before(optimizer, bucket)
    try:
        with changing(optimizer):
            for parameter in bucket:
                _open(optimizer, parameter, layers)
        with ExitStack() as updating:
            for each in brought(techniques, Updating):
                updating.enter_context(each.around_update(optimizer, bucket))
            # inside, because a technique may show the update other tensors than are kept
            with before.restored_on_failure(copy):
                yield
    except BaseException:
        before.restore_states()
        raise


def _layers_to_open(techniques: Sequence[Bringing]) -> list[StateForm]:
    """State layers from the top down to the lowest one that must be open during an update."""
    layers = brought(techniques, StateForm)
    lowest = next((at for at, form in enumerate(layers) if form.state_per_step), len(layers))
    return layers[lowest:]


def _open(optimizer: Optimizer, parameter: Parameter, layers: Sequence[StateForm]) -> None:
    state = optimizer.state.get(parameter)
    if state and layers:
        set_state(optimizer, parameter, unpacked(optimizer, parameter, state, layers), is_stepping=True)


def _close_all(optimizer: Optimizer, bucket: Sequence[Parameter], layers: Sequence[StateForm]) -> None:
    """Pack the state of a bucket again; when interrupted, first finish, then raise."""
    waiting = [parameter for parameter in bucket if layers and optimizer.state.get(parameter)]
    try:
        _close(optimizer, waiting, layers)
    except BaseException:
        _close(optimizer, waiting, layers)
        raise


def _close(optimizer: Optimizer, waiting: list[Parameter], layers: Sequence[StateForm]) -> None:
    while waiting:
        parameter = waiting[-1]
        state = packed(optimizer, parameter, optimizer.state[parameter], layers)
        set_state(optimizer, parameter, state, is_stepping=True)
        waiting.pop()


class _Before:
    """A bucket's state before its update, held so that going back needs no memory."""

    def __init__(self, optimizer: Optimizer, bucket: Sequence[Parameter]) -> None:
        self._optimizer = optimizer
        self._bucket = bucket
        self._states = {parameter: state for parameter in bucket if (state := optimizer.state.get(parameter))}
        self._entries = {parameter: kept_of(state) for parameter, state in self._states.items()}

    @contextmanager
    def restored_on_failure(self, copy: Copy | None) -> Iterator[None]:
        """Give the tensors an update writes to their values back when it raises; without `copy`, the small ones only."""
        everything = copy is not None
        copies = [(tensor, (copy or cloned)(tensor)) for tensor in self._written(everything=everything)]
        try:
            yield
        except BaseException:
            for tensor, before in copies:
                tensor.detach().copy_(before)
            raise

    def _written(self, *, everything: bool) -> list[torch.Tensor]:
        """Tensors the update writes to, or of state that was unpacked the small ones only.

        The large tensors that unpacking made are left out: the packed ones they came from are untouched.
        """
        written: list[torch.Tensor] = [*self._bucket] if everything else []
        if everything and _writes_gradients(self._optimizer):
            written += [parameter.grad for parameter in self._bucket if parameter.grad is not None]
        for parameter, entries in self._entries.items():
            if everything or self._is_opened(parameter):
                kept = {id(value) for value in entries.values()}
                values = self._optimizer.state[parameter].values()
                tensors = [value for value in values if isinstance(value, torch.Tensor) and id(value) in kept]
                written += [tensor for tensor in tensors if everything or tensor.numel() < SMALL_ELEMENTS]
        distinct = {id(tensor): tensor for tensor in written}  # parameters share the codebooks of 8-bit state
        return list(distinct.values())

    def _is_opened(self, parameter: Parameter) -> bool:
        return self._optimizer.state.get(parameter) is not self._states.get(parameter)

    def restore_states(self) -> None:
        """Make the entries of `optimizer.state` the dicts they were, with what they held."""
        for parameter in self._bucket:
            self._restore_state(parameter)
        restored([self._optimizer])

    def _restore_state(self, parameter: Parameter) -> None:
        state = self._states.get(parameter)
        if state is None:
            self._optimizer.state.pop(parameter, None)
        else:
            state.clear()
            state.update(self._entries[parameter])
            self._optimizer.state[parameter] = state


@contextmanager
def restored_on_failure(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Iterator[None]:
    """Context of an update which, when it raises, leaves parameters and state as they were."""
    before = _Before(optimizer, parameters)
    try:
        with before.restored_on_failure(cloned):
            yield
    except BaseException:
        before.restore_states()
        raise


def _writes_gradients(optimizer: Optimizer) -> bool:
    """Return whether an update changes gradients: fused kernels unscale them, foreach SGD adds momentum to them."""
    has_scale = getattr(optimizer, "grad_scale", None) is not None
    return has_scale or any(group.get("nesterov") for group in optimizer.param_groups)
