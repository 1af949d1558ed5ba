"""A training step on a fake twin of the live objects: what it would allocate, and what it would compute.

- `twin`: the copy of the live objects; `tracer`: whole steps on it, or parts of one; `fast_fakes`: operators on fake tensors
- `recorder`: allocations by category, as the ledger of `measuring` records them; `work`: operations and bytes of operators
- `depth`: traces of a model with many like blocks, from those of the same model with four
- `marks`: where modules begin and end, and where gradients are complete
- `cuda_*`: what CUDA would choose, on a build of torch without CUDA; `hidden_memory`: memory that no dispatch mode sees
"""
