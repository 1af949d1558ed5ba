"""`InjectedAdapters`: peft's layers on a live model, put in, taken out, merged and saved.

They are injected (`peft.inject_adapter_in_model`) and not wrapped (`get_peft_model`): the loop, its optimizer and its Trainer go on with
the same model object. A model of Transformers is told of them as by its own `add_adapter`, so that its `save_pretrained`, and with it
a Trainer's checkpoints, write peft's files.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from memlab.errors import RefusalError, WorkloadError
from memlab.extras import require
from memlab.plan import Adapters, BaseBits
from memlab.runtime.lifetimes import storage_of
from memlab.runtime.rng import RandomState
from memlab.techniques.adapters.targets import FIELD, written_for_peft
from memlab.techniques.adapters.waiting import Waiting
from memlab.techniques.precision.masters import masters_of

Parameter = nn.Parameter
_NAME = "default"  # of the adapter, as in peft
OF_TRANSFORMERS = "_hf_peft_config_loaded"  # says that a model of Transformers has adapters


class InjectedAdapters:
    """Adapters of one model, which are in it or wait beside it.

    Args:
        model: is kept by nobody here.
        setting: what they are like.
        names: those of the linear layers that get one.
    """

    def __init__(self, model: nn.Module, setting: Adapters, names: Collection[str]) -> None:
        self.setting = setting
        self.steps = 0  # updates since they were made
        self.learnt_beside = BaseBits.KEEP  # what the frozen weights were in when they learnt
        self.frozen: dict[int, Parameter] = {}  # by id, what does not train while they are in the model
        self.of_frozen = Waiting()  # gradients and optimizer state of these
        self.waiting = Waiting()  # their gradients and optimizer state, while they are not in the model
        self._kept: dict[int, torch.Tensor] = {}  # of parameters that are off the device, by id
        self._attributes: dict[str, Any] = {}  # that peft and Transformers gave the model
        self._layers: dict[str, Any] = {}  # peft's, by name of the user's layer
        with _as_before(model):
            self._inject(model, names)

    def _inject(self, model: nn.Module, names: Collection[str]) -> None:
        peft: Any = require("peft")
        setting, alpha = self.setting, self.setting.alpha
        layers = [model.get_submodule(name) for name in names]
        config = peft.LoraConfig(
            r=setting.rank,
            lora_alpha=int(alpha) if alpha.is_integer() else alpha,
            lora_dropout=setting.dropout,
            use_dora=setting.is_dora,
            target_modules=written_for_peft(model, names),
            # as peft sets it itself for layers of GPT-2, whose weights are the other way round
            fan_in_fan_out=all(not isinstance(layer, nn.Linear) for layer in layers),
        )
        known, mode = dict(vars(model)), _mode_of(model)
        # a twin's are made nowhere at first: torch moves no modules of tensors without values
        with warnings.catch_warnings(), nullcontext() if mode is None else torch.device("meta"):
            warnings.simplefilter("ignore")  # about the orientation of weights, which it puts right
            peft.inject_adapter_in_model(config, model, _NAME)
        self._layers = {name: model.get_submodule(name) for name in names}
        if hasattr(type(model), OF_TRANSFORMERS):
            config.base_model_name_or_path = vars(model).get("name_or_path")
            setattr(model, OF_TRANSFORMERS, True)
        self._attributes = {key: value for key, value in vars(model).items() if key not in known}
        for layer, own in zip(self._layers.values(), layers, strict=True):
            layer.train(own.training)
            if mode is not None:
                _give_shapes_alone(layer, mode)
        for layer in self._layers.values():
            self._keep_in_fp32(layer)
        self.config = config

    def _keep_in_fp32(self, layer: Any) -> None:
        """Have adapters beside 16-bit weights in fp32, as peft's own: small updates would be lost."""
        half = [p for p in self.parameters(layer) if p.dtype in (torch.float16, torch.bfloat16)]
        for parameter in half:
            parameter.data = parameter.data.float()
        if half and self.setting.is_dora and not isinstance(_own(layer).weight, FakeTensor):
            # the norm of the weights as the forward pass takes it then: both have to be the same to the bit
            dora, weight = layer.lora_magnitude_vector[_NAME], _own(layer).weight.detach().float()
            dora.weight.data = dora.get_weight_norm(weight, weight.new_zeros(()), layer.scaling[_NAME])

    # -- what they are -------------------------------------------------------------------------

    def parameters(self, layer: nn.Module | None = None) -> list[Parameter]:
        """Return the parameters of all adapters, or of one layer's."""
        if layer is not None:
            return [p for name, p in layer.named_parameters() if not name.startswith("base_layer.")]
        return [p for each in self._layers.values() for p in self.parameters(each)]

    @property
    def of_weights(self) -> dict[int, list[Parameter]]:
        """Return the adapters' parameters by id of the weight they are beside."""
        return {id(_own(layer).weight): self.parameters(layer) for layer in self._layers.values()}

    @property
    def instead(self) -> dict[int, nn.Module]:
        """Return the user's layers by id of peft's, which are in their place."""
        return {id(layer): _own(layer) for layer in self._layers.values()}

    @property
    def attributes(self) -> frozenset[str]:
        """Return the names of attributes that the model has because of them."""
        return frozenset(self._attributes)

    @property
    def learnt_in(self) -> str:
        """Return in how many steps they have learnt, in words."""
        return f"{self.steps} step{'s' * (self.steps != 1)}"

    @property
    def merging(self) -> str:
        """Return how what they have learnt is merged, as a part of a sentence; empty where it cannot be."""
        can_merge = self.learnt_beside is BaseBits.KEEP
        return "--lora off:merge adds it to the weights, " if can_merge else ""

    def describe(self, model: nn.Module) -> str:
        """Return how many there are, on what, and how much of the model trains, in words."""
        ends = dict.fromkeys(name.rpartition(".")[2] for name in self._layers)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        share = trained / sum(p.numel() for p in model.parameters())
        kind = "DoRA" if self.setting.is_dora else "LoRA"
        return f"{kind} of rank {self.setting.rank} beside {len(self._layers)} linear layer{'s' * (len(self._layers) != 1)} ({', '.join(ends)}): {100 * share:.2f} % of the parameters train"

    # -- in and out ----------------------------------------------------------------------------

    def put_in(self, model: nn.Module) -> None:
        """Put peft's layers in the places of the user's, which they hold."""
        for name, layer in self._layers.items():
            for parameter in self.parameters(layer):
                if (kept := self._kept.get(id(parameter))) is not None:
                    parameter.data = kept.to(_own(layer).weight.device, copy=True)
            layer.train(_own(layer).training)
            _put(model, name, _own(layer), layer)
        vars(model).update(self._attributes)

    def take_out(self, model: nn.Module) -> None:
        """Put the user's layers back in their places."""
        for name, layer in self._layers.items():
            _put(model, name, layer, _own(layer))
        for key in self._attributes:
            vars(model).pop(key, None)

    def send_away(self) -> None:
        """Have their parameters off the device."""
        for parameter in self.parameters():
            self._kept[id(parameter)] = parameter.data = self.waiting.away(parameter.data)

    def stepped(self) -> None:
        """Count an update; what was kept of before they were put in is no longer theirs."""
        self.steps += 1
        if self._kept:
            self._kept.clear()
        self.waiting.forget()

    @property
    def are_away(self) -> bool:
        """Return whether their parameters are off the device."""
        kept = ((p, self._kept.get(id(p))) for p in self.parameters())
        return any(away is not None and storage_of(p) == storage_of(away) for p, away in kept)

    # -- what was learnt -----------------------------------------------------------------------

    def merge(self) -> None:
        """Add what was learnt to the weights, whose data is replaced; they need not be in the model.

        Raises:
            RefusalError: a weight would not be finite; none was changed.
        """
        before = [(_own(layer).weight, _own(layer).weight.data) for layer in self._layers.values()]
        try:
            for layer in self._layers.values():
                device = _own(layer).weight.device
                lent = [(p, p.data) for p in self.parameters(layer)]
                try:
                    for parameter, data in lent:
                        parameter.data = data.to(device)
                    layer.merge(safe_merge=True, adapter_names=[_NAME])
                finally:
                    layer.merged_adapters.clear()
                    for parameter, data in lent:
                        parameter.data = data
        except ValueError as error:
            for weight, data in before:
                weight.data = data
            raise RefusalError(FIELD, "what the adapters learnt is not finite", "use --lora off:drop") from error

    def save(self, model: nn.Module, folder: str | Path) -> None:
        """Write them to a folder as peft does."""
        peft: Any = require("peft")
        safetensors: Any = require("safetensors")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        own = _Tree(self._layers, self.config)
        values = {name: _own_values(value) for name, value in own.state_dict(keep_vars=True).items()}
        found = peft.get_peft_model_state_dict(own, values, adapter_name=_NAME, save_embedding_layers=False)
        named = {f"base_model.model.{name}": value.detach().cpu().contiguous() for name, value in found.items()}
        safetensors.torch.save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.copy(self.config)
        path = vars(model).get("name_or_path") or getattr(getattr(model, "config", None), "_name_or_path", None)
        config.base_model_name_or_path, config.inference_mode = path, True
        config.save_pretrained(folder)

    def copied(self) -> Callable[[], None]:
        """Copy what training changes of them; return what puts it back."""
        counts, values = (self.steps, self.learnt_beside), [self.waiting.away(p.data) for p in self.parameters()]
        waiting = [each.copied() for each in (self.waiting, self.of_frozen)]

        def restore() -> None:
            self.steps, self.learnt_beside = counts
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.data.copy_(value)
            for put_back in waiting:
                put_back()

        return restore


class _Tree(nn.Module):
    """Stands for a model with adapters, and has nothing of it but these."""

    def __init__(self, layers: Mapping[str, nn.Module], config: Any) -> None:
        super().__init__()
        self.peft_config = {_NAME: config}
        for name, layer in layers.items():
            path, _, key = name.rpartition(".")
            parent: nn.Module = self
            for part in filter(None, path.split(".")):
                parent = parent._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            parent._modules[key] = layer


def _own_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter as the loop knows them."""
    masters = masters_of(tensor)
    values = None if masters is None else masters.values(tensor)
    return tensor if values is None else values


def _own(layer: nn.Module) -> Any:
    """The user's layer within one of peft's."""
    return layer.base_layer


def _put(model: nn.Module, name: str, before: nn.Module, layer: nn.Module) -> None:
    """Put a layer in the place of another; what the loop has put there meanwhile stays."""
    path, _, key = name.rpartition(".")
    children = model.get_submodule(path)._modules
    if children.get(key) is before:
        children[key] = layer


def _mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of a twin's parameters, which have no values; None for the user's model."""
    fake = next((p for p in model.parameters() if isinstance(p, FakeTensor)), None)
    return None if fake is None else fake.fake_mode


def _give_shapes_alone(layer: nn.Module, mode: FakeTensorMode) -> None:
    """Put parameters like those of a twin in the places of those that were made nowhere."""
    for module in layer.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                with mode:
                    made = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                module._parameters[key] = nn.Parameter(made)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Context after which random numbers are as they were, and which parameters train; where it fails, the modules as well."""
    random = RandomState()
    trained = [p for p in model.parameters() if p.requires_grad]
    tables: list[tuple[Any, dict[str, Any]]] = [(each._modules, dict(each._modules)) for each in model.modules()]
    own = dict(vars(model))
    try:
        yield
    except BaseException:
        for table, children in tables:
            table.clear()
            table.update(children)
        vars(model).clear()
        vars(model).update(own)
        raise
    finally:
        random.restore()
        for parameter in trained:
            parameter.requires_grad_(True)


# --- of which model --------------------------------------------------------------------------------

of_models: MutableMapping[nn.Module, InjectedAdapters] = WeakIdKeyDictionary()


def adapters_of(model: nn.Module) -> InjectedAdapters | None:
    """Return the adapters that memlab has made for a model, whether they are in it or wait beside it; None for none."""
    return of_models.get(model)


def note_adapters(model: nn.Module, adapters: InjectedAdapters | None) -> None:
    """Keep adapters beside a model, as long as it lives, in place of those that were; None for none."""
    if adapters is None:
        of_models.pop(model, None)
    else:
        of_models[model] = adapters


def save_adapters(model: nn.Module, folder: str | Path) -> None:
    """Write what `--lora` has taught a model to a folder, as peft does; also while it waits beside the model.

    ``peft.PeftModel.from_pretrained(model, folder)`` loads it.

    Args:
        model: the model, inside its wrappers.
        folder: is made if need be; files of the same names are replaced.

    Raises:
        WorkloadError: the model has no adapters of memlab's.
    """
    adapters = adapters_of(model)
    if adapters is None:
        raise WorkloadError(f"{type(model).__name__} has no adapters to save: --lora makes some")
    adapters.save(model, folder)
