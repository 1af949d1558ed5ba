"""One file for each subject of a plan: the values, the flag with all that is said of it, conflicts, what it saves at which cost.

What two settings exclude stands with one of them.
"""
