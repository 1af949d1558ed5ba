"""Number formats of a training step: `precision` is the technique.

`first_call` refuses models that half precision is not for, `loss_scale` serves fp16. Pure bf16: `pure_bf16` runs calls and serves the
loop, `masters` keeps the fp32 values, `own_form` saves and loads them, `packed_moments` packs what optimizers keep, `moments` is
the arithmetic.
"""
