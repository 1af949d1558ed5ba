"""Tensors off the device between uses: `activations`, `optimizer_state`, `params` and `frozen`, one technique each.

`spill` is where bytes are kept (host memory or a file, from a `pool`), `transfers` the copies beside the computation. `host_update` updates
on the host where the `link` is slower; `block_streaming` brings blocks of parameters, and `lending` the ones that the loop's own code
asks for.
"""
