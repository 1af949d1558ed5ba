"""Running plans to learn what they give: the fastest one that fits a budget, and a ladder of levers.

- `corrections`: what trials teach about the errors of predictions
- `deciding`: what is believed of every plan, and which one to run next
- `trials`: running one, and running on until nothing is worth a trial
- `finding`: `find_plan` and `choose_plan`
- `climbing`: `ladder`, which adds one setting after another
"""

from memlab.search.climbing import ladder
from memlab.search.finding import choose_plan, find_plan

__all__ = ["choose_plan", "find_plan", "ladder"]
