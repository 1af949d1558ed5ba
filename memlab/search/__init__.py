"""Running plans to learn what they give: the fastest one that fits a budget, and an ablation of techniques.

- `deciding`: what is believed of every plan, and which one to run next
- `corrections`: what trials teach about the errors of predictions
- `finding`: `find_plan` and `choose_plan`, and trials until nothing is worth one
- `ablating`: `ablation`, which adds one setting after another
"""

from memlab.search.ablating import ablation
from memlab.search.finding import choose_plan, find_plan

__all__ = ["ablation", "choose_plan", "find_plan"]
