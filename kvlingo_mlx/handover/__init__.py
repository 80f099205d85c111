"""A hand-over from start to end: the plan, the target's cache, the answer's tokens."""
