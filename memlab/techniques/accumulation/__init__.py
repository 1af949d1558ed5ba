"""Gradient accumulation inside one model call.

`accumulation` is the technique, `batchnorm` its companion setting. `micro` runs a call in parts; `split` cuts batches and `merge`
puts outputs together; `probe` finds out on a few rows how a model's batch splits, `judge` holds the first batch of each shape
against the whole, with `noise` giving both the same random numbers.
"""
