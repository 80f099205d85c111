"""A loaded model: its facts, its prompts, and what its layers write."""
