"""`PendingChanges`: which settings were asked for, and what has become of each."""

from __future__ import annotations

from memlab.errors import PlanError
from memlab.plan import FIELDS, Plan, PlanField
from memlab.plan.plan import BY_NAME
from memlab.records.live_state import Asked, Toggle


class PendingChanges:
    """The plan in force, the plan that is wanted, and the state of every setting between the two.

    Example:
        >>> pending_changes = PendingChanges()
        >>> pending_changes.ask("accumulation", "4").label, pending_changes.toggle("accumulation").text
        ('--accumulate 4', 'pending')
        >>> pending_changes.note_applied(pending_changes.target, step=12)
        >>> pending_changes.toggle("accumulation").text
        'applied at step 12'
    """

    def __init__(self) -> None:
        self.plan = Plan()  # in force
        self.target: Plan | None = None  # asked for and not yet in force, or None
        self._toggles: dict[str, Toggle] = {}

    @property
    def toggles(self) -> tuple[Toggle, ...]:
        """One per field of a plan."""
        return tuple(self.toggle(spec.name) for spec in FIELDS)

    def toggle(self, field: str) -> Toggle:
        value = _value(self.plan, BY_NAME[field])
        return self._toggles.get(field) or Toggle(field, value, value)

    def ask(self, field: str, text: str) -> Plan | None:
        """Ask for one setting beside the others; return the plan wanted now, None where it is refused at once."""
        if self.toggle(field).asked is Asked.REFUSED:
            del self._toggles[field]  # what was refused is past: this is asked anew
        try:
            plan = (self.target or self.plan).with_setting(field, text)
        except PlanError as error:
            self.refuse(field, text, str(error))
            return None
        return self.ask_plan(plan)

    def ask_plan(self, plan: Plan) -> Plan:
        self.target = plan if plan != self.plan else None
        for spec in FIELDS:
            value, wanted = _value(self.plan, spec), _value(plan, spec)
            if wanted != value:
                self._toggles[spec.name] = Toggle(spec.name, value, wanted, Asked.PENDING)
            elif self.toggle(spec.name).asked is Asked.PENDING:
                del self._toggles[spec.name]
        return plan

    def note_applied(self, plan: Plan, step: int) -> None:
        """A plan has come into force, asked for or not."""
        before, self.plan = self.plan, plan
        is_target = self.target is not None and self.target.lasting == plan
        for spec in FIELDS:
            value = _value(plan, spec)
            known = self._toggles.get(spec.name)
            is_pending = known is not None and known.asked is Asked.PENDING
            was_asked = is_pending and known is not None and (is_target or known.wanted == value)
            if was_asked or value != _value(before, spec):
                self._toggles[spec.name] = Toggle(spec.name, value, value, Asked.APPLIED, step)
        if is_target:
            self.target = None

    def note_refused(self, plan: Plan, reason: str) -> Plan | None:
        """A plan that was asked for does not apply; return what is still asked for, and what has been since, None for nothing.

        Where the reason begins with the name of a setting (`RefusalError`), that one alone is refused.
        """
        changed = {name: _value(plan, BY_NAME[name]) for name in plan.changes(self.plan)}
        named = reason.partition(":")[0]
        for field, wanted in changed.items():
            toggle = self.toggle(field)
            if named in changed and field != named:
                if toggle.asked is not Asked.PENDING:
                    self._toggles[field] = Toggle(field, toggle.value, wanted, Asked.PENDING)
            elif toggle.asked is not Asked.PENDING or toggle.wanted == wanted:
                self.refuse(field, wanted, reason)
        return self.ask_again(self.plan)

    def refuse(self, field: str, wanted: str, reason: str) -> None:
        """Note that one setting does not apply, and why."""
        value = _value(self.plan, BY_NAME[field])
        self._toggles[field] = Toggle(field, value, wanted, Asked.REFUSED, reason=reason)

    def ask_again(self, plan: Plan) -> Plan | None:
        """Ask for every setting that is still pending beside a plan that has come into force meanwhile."""
        pending = [toggle for toggle in self._toggles.values() if toggle.asked is Asked.PENDING]
        self.plan, self.target = plan, None
        for toggle in pending:
            self.ask(toggle.field, toggle.wanted)
        return self.target

    def forget(self, plan: Plan) -> None:
        """Begin again with a plan in force and nothing asked for."""
        self.plan, self.target = plan, None
        self._toggles.clear()

    def forget_past(self) -> None:
        """Say no more of what was applied and refused; what is still pending stays."""
        self._toggles = {field: each for field, each in self._toggles.items() if each.asked is Asked.PENDING}


def _value(plan: Plan, spec: PlanField) -> str:
    return spec.text(getattr(plan, spec.name))
