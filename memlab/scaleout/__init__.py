"""Handing the live run to many processes under PyTorch's and DeepSpeed's own engines, and taking it back.

Rules of a handover:

1. Objects travel by value in one pickle (`serialization`), tensors of the workload apart from it through
   `torch.distributed.checkpoint` (`tensors`), so that a rank reads no more than its shard.
2. Ranks are processes of their own (`launching`), started anew and never forked. Every rank runs the same loop
   over the same batches; at the model call it takes its own rows (`rows`), and gets back the outputs of all. So
   loops need no sampler of their own, and every rank sees the same loss.
3. An engine (`engines`) is put on at the two hooks, as a technique is.
4. State comes back into the live objects when every rank has ended well; until then nothing of theirs is touched.

This package itself imports nothing: what it needs of torch is slow to import, and most sessions never scale out.
"""
