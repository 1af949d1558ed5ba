"""Peak host memory of `memlab.build` against the usual way, for a model of about 400 MB in fp32."""

from __future__ import annotations

import tempfile
from dataclasses import asdict

from tests.bench.figures import Figure
from tests.helpers.host_peak import HostPeak, can_measure, host_peak

# of an ideal of 0.5 (0.33 from a file, where the usual way holds both model and file); Transformers' own reading of folders is
# what `build` uses, so there it is only not to be worse
_BOUNDS = {"from a configuration": 0.75, "from a Transformers folder": 1.02, "from safetensors into a module": 0.5}
_PREPARE = """
import copy, memlab, transformers
from transformers import LlamaConfig, LlamaForCausalLM
transformers.utils.logging.disable_progress_bar()

def llama(width, layers, vocabulary):
    sizes = dict(hidden_size=width, intermediate_size=int(2.75 * width), num_hidden_layers=layers, vocab_size=vocabulary)
    heads = dict(num_attention_heads=8, num_key_value_heads=8)
    return LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])

# whatever is imported or set up with the first model is not counted
small, config, folder = llama(64, 1, 100), llama({width}, {layers}, {vocabulary}), {folder!r}
memlab.build(small, dtype="bf16")
LlamaForCausalLM(small).to(torch.bfloat16)
LlamaForCausalLM(small).save_pretrained(folder + "/small")
LlamaForCausalLM.from_pretrained(folder + "/small").to(torch.bfloat16)
memlab.build(folder + "/small", dtype="bf16")
factory = lambda: LlamaForCausalLM._from_config(copy.deepcopy(config))
memlab.build(lambda: LlamaForCausalLM(small), dtype="bf16", weights=folder + "/small")
"""
_SAVE = "LlamaForCausalLM(config).save_pretrained(folder)"
_WAYS = {
    "from a configuration": (
        "model = LlamaForCausalLM(config).to(torch.bfloat16)",
        'model = memlab.build(config, dtype="bf16")',
    ),
    "from a Transformers folder": (
        "model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(torch.bfloat16)",
        'model = memlab.build(folder, dtype="bf16")',
    ),
    "from safetensors into a module": (
        "from safetensors.torch import load_file\n"
        "model = factory()\n"
        'model.load_state_dict(load_file(folder + "/model.safetensors"))\n'
        "model.to(torch.bfloat16)",
        'model = memlab.build(factory, dtype="bf16", weights=folder)',
    ),
}


def building(width: int = 1024, layers: int = 6, vocabulary: int = 16_000) -> list[Figure]:
    """Peaks of a Llama in bf16 on the CPU, built from a configuration and from files, over those of the usual way.

    Args:
        width: of the hidden states.
        layers: how many blocks.
        vocabulary: size of the embedding and of the head.
    """
    if not can_measure():
        return []
    with tempfile.TemporaryDirectory(prefix="bench-building-") as folder:
        prepare = _PREPARE.format(width=width, layers=layers, vocabulary=vocabulary, folder=folder)
        host_peak(_SAVE, prepare)
        return [_figure(name, *(host_peak(way, prepare) for way in ways)) for name, ways in _WAYS.items()]


def _figure(name: str, usual: HostPeak, built: HostPeak) -> Figure:
    details = {"usual": asdict(usual), "build": asdict(built), "own memory": built.own / max(1, usual.own)}
    return Figure(
        f"build in bf16 {name} against the usual way (host peak)", built.peak / usual.peak, _BOUNDS[name], details
    )
