"""Rules for what engines divide among ranks, and what they need for themselves, without torch.

1. A rank's step is that of one process on the rank's rows, to which an engine adds and from which it takes: every rule
   says at which moment (a module begins, a gradient is complete, the update begins) so many bytes come or go.
2. Sizes are those of the engines as `memlab.scaleout.engines` configures them, and moments those that their code has.
   `tests/scaleout/test_sharding.py` holds them to the ledger of real ranks.
3. What of it is in host memory is told apart, and counts as the device's where both are one (the CPU ledger).

Sources: `torch/distributed/fsdp/_fully_shard/` (torch 2.13), `torch/csrc/distributed/c10d/reducer.cpp`,
`deepspeed/runtime/zero/` (DeepSpeed 0.19), Rajbhandari et al., "ZeRO", https://arxiv.org/abs/1910.02054
"""

from memlab.scaleout.sharding.model_states import ModelStates, model_states

__all__ = ["ModelStates", "model_states"]
