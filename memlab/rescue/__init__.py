"""Recovery from out-of-memory errors: the loop goes on under a plan that needs less memory, and loses nothing.

The loop must not see the error, so it is caught where the work is done, and each place repeats its work in its own way.

- `rescuer`: what is repeated where, and the session's side of it; `recovery`: the same work under other plans until it fits;
  `evidence`: whether memory can run out in a step at all; `calls`: how training calls are run
- `repeatable`: a call of the model that can be made again; `guard`: its node in the loop's graph, and the backward pass; `outputs`: the tensors in
  what a model returns
- `loop_code`: the loop's own code between model call and optimizer step (loss function, unscaling, clipping)
- `evaluation`, `generation`: calls without gradients
- `update`: the optimizer's update
- `fallback`: which plan to try next; `nothing_fits`: what is left to do when there is none
- `retries`: steps that the allocator could serve only after giving back its cache
"""

from __future__ import annotations
