"""Gradient accumulation inside one model call.

`accumulation` is the technique, `batchnorm` its companion setting. `micro` runs a call in parts (`micro_outputs`,
`micro_inputs`); `split` cuts batches and `merge` puts outputs together; `probe` finds out on a few rows how a model's batch
splits. `judge` has the first batch of each shape run together and apart (`judgement`, with `noise` giving both the same
random numbers) and compared (`agreement`); a `verdict` is the result.
"""
