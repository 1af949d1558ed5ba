"""Time that the prediction of a whole plan space takes, in seconds of one CPU core.

python -m tests.bench.predicting            GPT-2 124M on 8 × 512 and Llama-8B on 4 × 2048, for this CPU and for an A100
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from memlab import Workload
from memlab.measuring.host_rates import host_rates
from memlab.predicting import predict_all

DEVICES = ("cpu", "A100 80GB")
RUNS = 2  # the second one finds modules imported


def gpt2() -> Workload:
    """GPT-2 124M on 8 × 512."""
    return _workload(GPT2LMHeadModel(GPT2Config()), 8, 512)


def llama() -> Workload:
    """Llama-8B, without memory, on 4 × 2048."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, **sizes))
    return _workload(model, 4, 2048)


def _workload(model: torch.nn.Module, rows: int, positions: int) -> Workload:
    words = torch.zeros(rows, positions, dtype=torch.long)  # [b, s]
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model.train(), optimizer, batch={"input_ids": words, "labels": words.clone()})


MODELS: tuple[Callable[[], Workload], ...] = (gpt2, llama)


def seconds_for(workload: Workload, device: str) -> tuple[int, float]:
    """Number of plans, and the time of this process that their prediction takes."""
    begin = process_time()
    predictions = predict_all(workload, device, progress=lambda line: None)
    return len(predictions), process_time() - begin


def main() -> None:
    """Predict, and print a line for each model and device."""
    torch.set_num_threads(1)
    host_rates()  # measured once in a process
    for make in MODELS:
        workload = make()
        for device in DEVICES:
            for run in range(1, RUNS + 1):
                plans, seconds = seconds_for(workload, device)
                print(f"{make.__name__}, {device}, run {run}: {plans} plans in {seconds:.1f} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
