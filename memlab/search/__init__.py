"""Running plans to learn what they give: the fastest one that fits a budget, and an ablation of techniques.

- `corrections`: what trials teach about the errors of predictions
- `deciding`: what is believed of every plan, and which one to run next
- `trials`: running one, and running on until nothing is worth a trial
- `finding`: `find_plan` and `choose_plan`
- `ablating`: `ablation`, which adds one setting after another
"""

from memlab.search.ablating import ablation
from memlab.search.finding import choose_plan, find_plan

__all__ = ["ablation", "choose_plan", "find_plan"]
