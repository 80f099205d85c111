"""From a prompt to an answer by another model: the plan, the cache, the tokens."""
