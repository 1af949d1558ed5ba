"""Operators on fake tensors, several times as fast as `FakeTensorMode` runs them.

A step on a twin repeats the same operators on the same shapes block after block. The first time one is met, the
official fake mode runs it, unless its schema says that it only writes or gives views; what it returned is learnt as a recipe:

1. *Written*: the result is an argument (in-place operators). It is returned, and that is all.
2. *Made*: the results are new storages. They are made from the shapes, strides and dtypes seen.
3. *Viewed*: the result shares an argument's storage. The meta kernel of the view is run, without what surrounds it.
4. Anything else (values asked for, wrappers, results of other kinds) always goes the official way.

Recipes are kept by operator and by everything a result can depend on: shapes, strides, dtypes and plain arguments. They
serve all traces of the process in which operators choose alike.
`tests/trace/test_fast_fakes.py` holds both ways to the same events.

Some fakes are not like the results of real operators, and are put right (`_CORRECTIONS`); `tests/trace/test_corrections.py`
compares each with the real operator:

- `mse_loss`, `smooth_l1_loss`, `binary_cross_entropy` and `soft_margin_loss` with a reduction write their elements into
  the result first, whose storage keeps that size (aten/src/ATen/native/BinaryOps.cpp and Loss.cpp).
- Norms of a half-precision input with fp32 weights keep their statistics in fp32, for which the fake has the dtype of the
  input; that of `native_group_norm` also gives a gradient in the dtype of the input, for which the fake has fp32
  (aten/src/ATen/native/group_norm.cpp, layer_norm.cpp and Normalization.cpp).
- `native_layer_norm_backward` gives a contiguous gradient, for which the fake has the strides of the one that comes in.
- `mkldnn_rnn_layer` keeps a workspace for backward, which the fake has no bytes for. Its size is oneDNN's secret, so a
  layer of zeros is run once for each shape.

Others have no fake for what runs (`_INSTEAD`): `_ctc_loss` reads the lengths, which are there with their values, and
`_grouped_mm` is refused but in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memlab.measuring.operator_effects import OperatorEffect, effect_of
from memlab.runtime.dispatch import HALF
from memlab.runtime.tree import tensors_in

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_META = torch.device("meta")
_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        complex,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)
_NO_TENSOR = (type(None), int)  # kinds of results that shapes alone decide
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_OFFICIAL, _WRITTEN, MADE, _VIEWED = range(4)
_MOST_RECIPES = 20_000
_CHANGES_METADATA = frozenset({torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(slots=True)
class Recipe:
    """Recipe for an operator's result on given shapes."""

    way: int  # one of the four ways
    # for each result the place of the argument it is, or shape, stride and dtype; None or a number where it is no tensor
    results: tuple[Any, ...] = ()
    container: Callable[[Iterable[Any]], Any] | None = None  # the type the results come in; None for a single one
    cost: Any = None  # what the recorder has found that a call costs

    @property
    def bears_nothing(self) -> bool:
        """Return whether it is known that no storage is born or resized."""
        return self.way in (_WRITTEN, _VIEWED)


@functools.lru_cache(maxsize=4)
def recipes_for(_choices: Any) -> dict[Any, Recipe]:
    """Return the recipes of the process for operators that choose in one way."""
    return {}


# places of two arguments that an operator takes in one dtype alone, of which fakes know nothing
_ALIKE = {
    **dict.fromkeys((_aten.index_add.default, _aten.index_add_.default), (0, 3)),
    **dict.fromkeys((_aten.index_copy.default, _aten.index_copy_.default), (0, 3)),
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
}


class FastFakes:
    """Runs operators on the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode, recipes: dict[Any, Recipe] | None = None) -> None:
        self.mode = mode
        # it is one for the process, and gives results in storages of another size than those it was told of
        mode.cache_enabled = False
        self._recipes: dict[Any, Recipe] = {} if recipes is None else recipes
        with mode:
            self._template = dict(torch.empty(1, device="cpu").__dict__)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Recipe | None]:
        """The result of an operator, and the recipe it is known by (None when it is not to be remembered)."""
        key = _key(func, args, kwargs)
        if key is None:
            return self._official(func, args, kwargs), None
        recipe = self._recipes.get(key)
        if recipe is None:
            _require_alike(func, args)
        if recipe is None and (written := _only_writes_to(func)) is not None:
            recipe = self._recipes[key] = Recipe(_WRITTEN, written, tuple if len(written) > 1 else None)
        if recipe is None and _is_view(func):
            out = self._viewed(func, args, kwargs)
            if _share(out if isinstance(out, (list, tuple)) else [out], args):
                recipe = self._recipes[key] = Recipe(_VIEWED)
                return out, recipe
        if recipe is None:
            out = self._official(func, args, kwargs)
            if len(self._recipes) >= _MOST_RECIPES:
                self._recipes.clear()
            recipe = self._recipes[key] = _learnt(func, args, kwargs, out)
            # of several results the fake mode may give one twice, of which the operator makes two
            return self._made(recipe) if recipe.way == MADE and recipe.container is not None else out, recipe
        if recipe.way == MADE:
            return self._made(recipe), recipe
        if recipe.way == _WRITTEN:
            if not recipe.results:
                return None, recipe
            results = tuple(args[place] for place in recipe.results)
            return (results[0] if recipe.container is None else recipe.container(results)), recipe
        if recipe.way == _VIEWED:
            return self._viewed(func, args, kwargs), recipe
        return self._official(func, args, kwargs), recipe

    def _official(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        instead = _INSTEAD.get(func)
        if instead is not None:
            described = instead(*args, **kwargs)
            with self.mode:
                results = tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in described)
            return results if len(func._schema.returns) > 1 else results[0]
        return corrected(self.mode, func, args, kwargs, func(*args, **kwargs))

    def _made(self, recipe: Recipe) -> Any:
        made = [self._new(*result) if type(result) is tuple else result for result in recipe.results]
        return made[0] if recipe.container is None else recipe.container(made)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what `torch.empty_like` gives for a fake."""
        is_plain = tensor.is_contiguous()
        return self._new(tensor.shape, tensor.stride(), tensor.dtype) if is_plain else torch.empty_like(tensor)

    def _new(self, shape: Any, stride: Any, dtype: torch.dtype) -> FakeTensor:
        return self._wrapped(torch.empty_strided(shape, stride, dtype=dtype, device=_META))

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a view's meta kernel as `in_kernel_invocation_manager` does, which is slower as a generator."""
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            self.mode.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                out = func(*args, **kwargs)
            finally:
                self.mode.in_kernel_invocation = False
        if type(out) is torch.Tensor:
            return self._wrapped(out)
        return type(out)(self._wrapped(view) for view in out)

    def _wrapped(self, meta: torch.Tensor) -> FakeTensor:
        """Return what `FakeTensor.__new__` makes of a meta tensor, without its checks."""
        fake: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._template)
        return fake


def _require_alike(func: Any, args: tuple[Any, ...]) -> None:
    """Raise what an operator raises that finds two dtypes where it takes one."""
    dtypes = [args[place].dtype for place in _ALIKE.get(func, ())]
    if len({*dtypes}) > 1:
        name = func._schema.name.removeprefix("aten::")
        raise RuntimeError(f"{name}() expected the same dtype, but got {dtypes[0]} and {dtypes[1]}")


def _key(func: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return all that the result's shape can depend on; None when that cannot be said."""
    if func is _aten._ctc_loss.Tensor:  # depends on the values of its lengths
        return None
    parts: list[Any] = [func]
    for value in args:
        part = _part(value)
        if part is None:
            return None
        parts.append(part)
    for name, value in kwargs.items():
        part = _part(value)
        if part is None:
            return None
        parts.append((name, part))
    return tuple(parts)


def _part(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.fake_device.type != "cpu":
            return None
        return value.shape, value.stride(), value.dtype
    if kind in _PLAIN:
        return kind, value
    if kind is list or kind is tuple:
        parts = tuple(_part(item) for item in value)
        return None if None in parts else (kind, parts)
    if kind in _ORDINARY and value.layout is torch.strided:
        return "real", value.shape, value.stride(), value.dtype
    return None


@functools.cache
def _only_writes_to(func: Any) -> tuple[int, ...] | None:
    """Places of the arguments that an operator returns which does nothing but write to them; None of any other."""
    schema = getattr(func, "_schema", None)
    if schema is None or _CHANGES_METADATA & set(func.tags) or effect_of(func) == OperatorEffect.RESIZE:
        return None
    written = [place for place, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write]
    is_all = all(returned.alias_info is not None and returned.alias_info.is_write for returned in schema.returns)
    if not written or not is_all or len(schema.returns) not in (0, len(written)):
        return None
    return tuple(written[: len(schema.returns)])


@functools.cache
def _is_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    aliases = [] if schema is None else [returned.alias_info for returned in schema.returns]
    is_plain = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return is_plain and not _CHANGES_METADATA & set(func.tags) and _is_wholly_meta(func)


def _share(results: Iterable[torch.Tensor], args: Iterable[Any]) -> bool:
    inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in([*args])}
    return all(result.untyped_storage()._cdata in inputs for result in results)


def _learnt(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Recipe:
    schema = getattr(func, "_schema", None)
    if schema is None or _CHANGES_METADATA & set(func.tags) or effect_of(func) == OperatorEffect.RESIZE:
        return Recipe(_OFFICIAL)
    if not schema.returns:
        return Recipe(_OFFICIAL)
    container = None if isinstance(out, torch.Tensor) else type(out)
    results = (out,) if container is None else out
    if container not in (None, tuple, list) or not _all_fakes(results):
        return Recipe(_OFFICIAL)
    aliases = [returned.alias_info for returned in schema.returns]
    shares = [type(result) not in _NO_TENSOR and _share([result], [*args, *kwargs.values()]) for result in results]
    if all(shares) and _is_wholly_meta(func):
        return Recipe(_VIEWED)
    if any(shares) or any(alias is not None for alias in aliases) or not all(map(_is_own_storage, results)):
        return Recipe(_OFFICIAL)
    made = (r if type(r) in _NO_TENSOR else (r.shape, r.stride(), r.dtype) for r in results)
    return Recipe(MADE, tuple(made), container)


def _all_fakes(results: Iterable[Any]) -> bool:
    return all(type(each) in _NO_TENSOR or (type(each) is FakeTensor and _is_plain(each)) for each in results)


def _is_plain(fake: FakeTensor) -> bool:
    return fake.constant is None and fake.layout is torch.strided and fake.fake_device != _META


def _is_wholly_meta(func: Any) -> bool:
    """Return whether a view needs nothing of the fake mode: torch's own, with a meta kernel or made of ones that have."""
    name = func.name().partition(".")[0]
    return bool(func.namespace == "aten") and name not in ("aten::lift_fresh", "aten::_to_copy", "aten::to")


def _is_own_storage(result: Any) -> bool:
    """Return whether a result fills a storage of its own, as `empty_strided` would make it."""
    if type(result) in _NO_TENSOR:
        return True
    if result.storage_offset() != 0:
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True))
    needed = 0 if result.numel() == 0 else extent * result.element_size()
    return bool(result.untyped_storage().nbytes() == needed)


_NO_REDUCTION = 0

_Correction = Callable[[FakeTensorMode, tuple[Any, ...], Any], Any]


def corrected(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
    """The result of an operator on fakes as the real operator would give it."""
    correction = _CORRECTIONS.get(func)
    return out if correction is None else correction(mode, (*args, *kwargs.values()), out)


def _with_storage_of_elements(mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    reduction = next((value for value in args[2:4] if type(value) is int), None)
    if reduction == _NO_REDUCTION or not isinstance(out, FakeTensor):
        return out
    shape = torch.broadcast_tensors(args[0], args[1])[0].shape  # type: ignore[no-untyped-call]
    with mode:
        return torch.empty(shape, dtype=out.dtype, device=out.device).as_strided((), ())


def _is_mixed(values: torch.Tensor, weight: torch.Tensor | None) -> bool:
    return values.dtype in HALF and weight is not None and weight.dtype is torch.float32


def _norm(place: int, mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    """Return what a norm gives whose weight is the argument at a place."""
    if not _is_mixed(args[0], args[place]):
        return out
    with mode:
        normalized = torch.empty_like(out[0], dtype=args[0].dtype)
        statistics = [torch.empty_like(part, dtype=torch.float32) for part in out[1:]]
    return (normalized, *statistics)


def _group_norm_backward(mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    values = args[1]
    if out[0] is None or out[0].dtype is values.dtype:
        return out
    with mode:
        return (torch.empty_like(values), *out[1:])


def _layer_norm_backward(mode: FakeTensorMode, _args: tuple[Any, ...], out: Any) -> Any:
    if out[0] is None or out[0].is_contiguous():
        return out
    with mode:
        return (torch.empty_like(out[0], memory_format=torch.contiguous_format), *out[1:])


def _recurrent_layer(mode: FakeTensorMode, args: tuple[Any, ...], out: Any) -> Any:
    *outputs, workspace = out
    size_bytes = _workspace_bytes(*(_described(value) for value in args))
    if workspace is None or not size_bytes:
        return out
    with mode:
        return (*outputs, torch.empty(size_bytes, dtype=torch.uint8, device=workspace.device))


@dataclass(frozen=True)
class _Described:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype


def _described(value: Any) -> Any:
    """A value in a form that can be looked up."""
    if isinstance(value, torch.Tensor):
        return _Described(value.shape, value.dtype)
    return tuple(value) if isinstance(value, list) else value


@functools.lru_cache(maxsize=64)
def _workspace_bytes(*described: Any) -> int:
    """Bytes that a recurrent layer keeps for its backward pass, from running it on zeros."""
    args = [
        torch.zeros(value.shape, dtype=value.dtype, device="cpu") if isinstance(value, _Described) else value
        for value in described
    ]
    workspace: torch.Tensor | None = _aten.mkldnn_rnn_layer.default(*args)[-1]
    return 0 if workspace is None else workspace.untyped_storage().nbytes()


_CORRECTIONS: dict[Any, _Correction] = {
    _aten.mse_loss.default: _with_storage_of_elements,
    _aten.binary_cross_entropy.default: _with_storage_of_elements,
    _aten.soft_margin_loss.default: _with_storage_of_elements,
    _aten.smooth_l1_loss.default: _with_storage_of_elements,
    _aten.native_group_norm.default: functools.partial(_norm, 1),
    _aten.native_batch_norm.default: functools.partial(_norm, 1),
    _aten.native_layer_norm.default: functools.partial(_norm, 2),
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.mkldnn_rnn_layer.default: _recurrent_layer,
}


_Results = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each


def _ctc_loss(
    log_probs: torch.Tensor, _targets: torch.Tensor, _input_lengths: Any, target_lengths: Any, *_options: Any
) -> _Results:
    """Losses of the rows, and what the backward pass needs (aten/src/ATen/native/LossCTC.cpp).

    Raises:
        NotImplementedError: half precision, which the operator has no kernel for.
    """
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(f'"ctc_loss" not implemented for {log_probs.dtype}')
    lengths = target_lengths.tolist() if isinstance(target_lengths, torch.Tensor) else target_lengths
    positions, rows, _classes = log_probs.shape
    states = 2 * max(lengths, default=0) + 1
    return ((rows,), log_probs.dtype), ((rows, positions, states), log_probs.dtype)


def _ctc_loss_backward(_grad: torch.Tensor, log_probs: torch.Tensor, *_rest: Any) -> _Results:
    return ((tuple(log_probs.shape), log_probs.dtype),)


def _grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> _Results:
    """Products of groups of rows, of columns, or of matrices (aten/src/ATen/native/GroupedMMUtils.h)."""
    shape: tuple[int, ...] = (first.size(-2), second.size(-1))
    if first.dim() == second.dim():
        shape = (first.size(0) if offs is None else offs.size(0), *shape)
    return ((shape, out_dtype or first.dtype),)


_INSTEAD: dict[Any, Callable[..., _Results]] = {
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    _aten._grouped_mm.default: _grouped_mm,
}
