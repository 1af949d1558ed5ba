"""Pictures and tables of records: pure functions, nothing here measures or changes anything.

- `text`: tables as plain text; `html`: the same with inline styles, for a saved notebook
- `image`: a receipt, an ablation, ranks as a static PNG of bars, by matplotlib
- `timeline_image`: the memory of a step over time, likewise, or of several steps on one scale
- `pareto`: memory against throughput, drawn by `pareto_image`
- `ablation`: what its table says
- `inference`: calls that only run forward, in words
- `showing`: which of them `print` and a cell use for which record
- `ranks`: ranks of a run in many processes, and how many of which GPU do
- `tables`: records reduced to a `table.Table`; `ranking`: which predictions are shown, in which order; `wording`: figures in words
- `live_figure`: a run as a panel shows it, as plotly takes it, in the pictures of `live_memory` and `live_settings`;
  `live_svg`: the same in a few lines of HTML

matplotlib is imported when a picture is asked for, never before; plotly not at all.
"""
