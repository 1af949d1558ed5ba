"""Everything structural that a session must give back: what hangs on modules, parameters, optimizers and torch itself.

Values of tensors are not looked at (`memlab.session.snapshot.Snapshot` compares those); identities are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memlab.session import session_of

Fingerprint = dict[str, Any]

# what schedulers and Accelerate leave behind themselves, memlab or not
_MARKS_OF_OTHERS = {"_opt_called", "_is_accelerate_prepared"}


def fingerprint(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), schedulers: Iterable[Any] = ()
) -> Fingerprint:
    """A comparable description of live objects and of torch's global state.

    Identities are compared by `id`, so two fingerprints make sense only while the objects live.
    """
    # under pure bf16 weights that have been read say that they are in fp32
    session = session_of(model)
    if session is not None and session.in_force.held_tensors:
        [tensor.data for tensor in (*model.parameters(), *model.buffers())]
    marks = dict(_of_model(model))
    for index, optimizer in enumerate(optimizers):
        marks.update({f"optimizer {index}: {key}": mark for key, mark in _of_optimizer(optimizer).items()})
    for index, scheduler in enumerate(schedulers):
        marks[f"scheduler {index}"] = (type(scheduler), id(scheduler.optimizer), sorted(vars(scheduler)))
    marks.update(global_state())
    return marks


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed between two fingerprints, one line each."""
    keys = [*before, *(key for key in after if key not in before)]
    pairs = ((key, before.get(key, "absent"), after.get(key, "absent")) for key in keys)
    return [f"{key}: {_change(was, now)}" for key, was, now in pairs if was != now]


def _change(was: Any, now: Any) -> str:
    if isinstance(was, list) and isinstance(now, list):
        gone, come = [x for x in was if x not in now], [x for x in now if x not in was]
        return f"gone {gone!r}, come {come!r}" if gone or come else f"another order: {now!r}"
    return f"{was!r} → {now!r}"


def global_state() -> Fingerprint:
    """Torch's own switches, registries and stacks."""
    top_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "torch grad mode": torch.is_grad_enabled(),
        "torch default dtype": torch.get_default_dtype(),
        "torch matmul precision": torch.get_float32_matmul_precision(),
        "torch autocast": tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ),
        "torch autocast cache": torch.is_autocast_cache_enabled(),
        "torch.nn.Module.__call__": nn.Module.__call__,
        "torch saved-tensors hooks": None if top_hooks is None else tuple(map(id, top_hooks)),
        "torch dispatch modes": [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()],
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch threads": torch.get_num_threads(),
        **{f"torch {name}": _hooks(getattr(torch_module, name)) for name in _names(torch_module, "_global_")},
        **{f"torch {name}": _hooks(getattr(torch_optimizer, name)) for name in _names(torch_optimizer, "_global_")},
    }


def _names(module: Any, prefix: str) -> list[str]:
    return sorted(name for name in vars(module) if name.startswith(prefix))


def _of_model(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules(remove_duplicate=False):
        label = f"module {name or '(root)'}"
        own = vars(module)
        yield f"{label} class", (id(module), type(module))
        yield f"{label} attributes", sorted(set(own) - _MARKS_OF_OTHERS)
        yield f"{label} forward", id(own["forward"]) if "forward" in own else None
        for key in sorted(key for key in own if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))):
            yield f"{label} {key}", _hooks(own[key])
        yield f"{label} training", module.training
        yield f"{label} parameters", {key: id(value) for key, value in module._parameters.items()}
        yield f"{label} buffers", {key: _of_tensor(value) for key, value in module._buffers.items()}
        yield f"{label} flat weights", [id(weight) for weight in own.get("_flat_weights") or ()]
    names_by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_identity.setdefault(id(parameter), []).append(name)
        yield f"parameter {name}", _of_tensor(parameter)
    yield "ties", sorted(names_by_identity.values())


def _of_tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return (
        id(tensor),
        type(tensor),
        tensor.dtype,
        str(tensor.device),
        tuple(tensor.shape),
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.requires_grad,
        # torch leaves an empty table behind when the last hook is removed
        _hooks(tensor._backward_hooks or {}),
        _hooks(getattr(tensor, "_post_accumulate_grad_hooks", None) or {}),
        sorted(vars(tensor)) if hasattr(tensor, "__dict__") else [],
    )


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Fingerprint:
    own = vars(optimizer)
    return {
        "class": (id(optimizer), type(optimizer)),
        "attributes": sorted(set(own) - _MARKS_OF_OTHERS),
        "step": id(own["step"]) if "step" in own else None,
        "class's step": id(type(optimizer).step),
        "state": (id(optimizer.state), type(optimizer.state)),
        "groups": id(optimizer.param_groups),
        "each group": [
            (id(group), list(group), id(group["params"]), [id(p) for p in group["params"]])
            for group in optimizer.param_groups
        ],
        **{key: _hooks(own[key]) for key in sorted(own) if key.endswith("_hooks")},
    }


def _hooks(table: Any) -> Any:
    if isinstance(table, Mapping):
        return [(key, id(hook)) for key, hook in table.items()]
    return [id(hook) for hook in table] if isinstance(table, (Sequence, set)) else table
