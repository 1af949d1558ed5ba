"""memlab against the tools people use already, on the same work: ``python -m tests.bench.peers``.

- `records`: what one run of one contestant left behind, and what a contest is; standard library only
- `verdicts`: ratios, their spread, and what they say; standard library only
- `page`, `picture`: results as text, Markdown and a page; standard library only
- `contests`: the list of all contests; one file each: `bert_table`, `accumulation`, `finding`, `eight_bit`,
  `optimizer_offload`, `activation_offload`, `checkpointing`, `chunked_loss`, `gradient_release`, `switching`
- `models`, `watching`, `loops`: the work, how it is measured, and the loops it is done in
- `runner`, `child`: every contestant in a process of its own, in turns, resumed where it stopped
"""
