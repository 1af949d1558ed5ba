"""Looking for the fastest plan that fits a budget.

- `corrections`: what trials teach about the errors of predictions
- `deciding`: what is believed of every plan, and which one to run next
- `trials`: running one, and running on until nothing is worth a trial
- `finding`: `find_plan` and `choose_plan`
"""

from memlab.search.finding import choose_plan, find_plan

__all__ = ["choose_plan", "find_plan"]
