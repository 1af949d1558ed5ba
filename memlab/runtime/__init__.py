"""The training loop as it runs: where memlab meets it, and what protects it meanwhile.

`workload` is the model with its optimizers and batch, `hooks` the two places where techniques act (the model call and the
optimizer step), `optimizer_step` an update in buckets and `plain_step` the optimizer's own, `state_layers` the forms of optimizer state
(`state_entries` what is in its dicts), `out_of_memory` the errors,
`interrupts` Ctrl-C, `dispatch` and `loop_mode` torch's modes, `observer` who watches, `own_steps` the steps that memlab makes itself,
`rounds` loops of which traces run a part.

`mechanisms` are what techniques bring along for any of this.

What techniques share: `modules` (looking into a model), `tree` (leaves of values), `lazy` (tensors computed when looked at), `rng`
(states of all generators), `reach` (what a forward may read or change beside
its inputs; `containers` read and fill what holds it, `model_state` restores it for a run again, `surroundings` names what has changed), `aliases` (stand-ins for parameters), `graphs` (outputs before others), `autocast`.
"""
