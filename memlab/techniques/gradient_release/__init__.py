"""Updates inside the backward pass.

`gradient_release` is the technique, `watch` sees what the loop does with gradients, `groups` hears of parameters that optimizers
get, `reasons` says why a loop is refused.
"""
