"""Building on a real GPU: what it takes of the device and of the host, and that weights are those of the usual way."""

import pytest
import torch
import transformers as hf
from torch import nn

import memlab
from tests.building.built_models import families
from tests.building.conftest import Rotary, Tied, WritesLate, copied_layers, plain, recurrent, wide_bytes
from tests.helpers.host_peak import can_measure, host_peak
from tests.helpers.needs import needs

pytestmark = needs(gpu=1)
__all__ = ["wide_bytes"]  # a fixture

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 8}
LLAMA = hf.LlamaConfig(**SIZES, num_key_value_heads=8, vocab_size=16_000, architectures=["LlamaForCausalLM"])
LARGEST = 4 * 16_000 * 1024  # its embedding in fp32


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def device_peak(build) -> tuple[nn.Module, int]:
    build("small")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = build("")
    return model, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factory", [plain, copied_layers, recurrent, Tied, WritesLate], ids=lambda f: f.__name__)
def test_weights_are_those_of_the_usual_way(factory, dtype, wide_bytes):
    torch.manual_seed(5)
    usual = factory().to("cuda", dtype)
    of_device = torch.cuda.get_rng_state()
    torch.manual_seed(5)
    torch.cuda.set_rng_state(of_device)
    built = memlab.build(factory, device="cuda", dtype=dtype)
    assert torch.equal(torch.cuda.get_rng_state(), of_device)
    for (name, expected), found in zip(usual.state_dict().items(), built.state_dict().values(), strict=True):
        assert found.device == expected.device
        assert found.dtype == expected.dtype
        assert found.equal(expected), name


@pytest.mark.parametrize("family", sorted(families()))
def test_models_of_transformers_are_on_the_device(family, wide_bytes):
    model_class, config = families()[family]
    torch.manual_seed(5)
    usual = model_class(config).to(torch.bfloat16)
    torch.manual_seed(5)
    built = memlab.build((model_class, config), device="cuda", dtype="bf16")
    assert {tensor.device.type for tensor in [*built.parameters(), *built.buffers()]} == {"cuda"}
    for (name, expected), found in zip(usual.named_parameters(), built.parameters(), strict=True):
        assert found.cpu().equal(expected), name


def test_chosen_formats_are_kept_on_the_device(wide_bytes):
    built = memlab.build(Rotary, device="cuda", dtype="bf16")
    assert built.frequencies.dtype == torch.float32
    assert {tensor.device.type for tensor in [*built.parameters(), *built.buffers()]} == {"cuda"}


def test_the_device_holds_the_model_and_no_more_from_a_configuration():
    small = hf.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, vocab_size=100)
    model, peak = device_peak(
        lambda which: memlab.build((hf.LlamaForCausalLM, small if which else LLAMA), device="cuda", dtype="bf16")
    )
    assert peak <= 1.05 * nbytes(model)


def test_the_device_holds_the_model_and_no_more_from_files(tmp_path):
    for name, config in (("small", hf.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, vocab_size=100)), ("", LLAMA)):
        hf.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    model, peak = device_peak(lambda which: memlab.build(tmp_path / which, device="cuda", dtype="bf16"))
    assert peak <= 1.05 * nbytes(model)

    def with_weights(which: str) -> nn.Module:
        return memlab.build(
            lambda: hf.LlamaForCausalLM(LLAMA),
            device="cuda",
            dtype="bf16",
            weights=tmp_path,
        )

    model, peak = device_peak(with_weights)
    assert peak <= 1.05 * nbytes(model)


@pytest.mark.skipif(not can_measure(), reason="needs /proc/self/clear_refs")
def test_the_host_holds_no_copy_of_the_model():
    prepare = f"""
import memlab
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig.from_dict({LLAMA.to_dict()!r})
small = LlamaConfig.from_dict({{**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 100}})
memlab.build((LlamaForCausalLM, small), device="cuda", dtype="bf16")
"""
    built = host_peak('model = memlab.build((LlamaForCausalLM, config), device="cuda", dtype="bf16")', prepare)
    # the embedding in fp32, its copy on the way to the device, and 32 MiB in waiting, of a model of 418 MiB in fp32
    assert built.own < 1.5 * LARGEST + 64 * 2**20
