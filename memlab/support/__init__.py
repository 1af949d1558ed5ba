"""What helps people who help others: `memlab doctor` looks over a machine, `%memfit bug` writes down what a maintainer needs.

- `machine`: versions, processors and memory, without names of people, files or hosts
- `doctor`: checks of a machine, and a short run
- `bug`: a report about a notebook: versions, plan, log and shapes; no values, no paths, no code
"""
