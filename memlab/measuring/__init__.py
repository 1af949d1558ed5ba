"""Measurement: memory and speed of the real training loop.

- `steps`: `Meter`, which observes a session: times of all steps, memory in detail on two steps per plan and rarely after
  (`times`: of all steps, by plan; `models`: whose memory is told apart)
- `loop_meter`: one meter for the models that train in one loop
- `leaks`: what a loop holds more of after each step; `held`: the tensors that variables hold
- `worst_batch`: the largest batch that a loader can give
- `runs`: `measure` and `compare`, which put everything back
- `device`: what counts memory, a CPU or a GPU; `ledger`: a dispatch mode that records each storage on the CPU
- `host_rates`: how fast this host computes and copies
"""
