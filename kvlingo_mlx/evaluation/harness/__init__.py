"""lm-eval's tasks, answered from translated caches."""
