"""Recomputation of activations in the backward pass.

`checkpointing` is the technique. `look` measures in the first training call what every module keeps (`kept`); from that
`segments`, `budget` and `compiled` choose what is recomputed. `rerun` runs a part a second time as the first:
what it reads is as it was (`runtime.model_state`), `selective` keeps results that are expensive to compute, `part_hooks` keeps hooks that only watch from running twice.
"""
