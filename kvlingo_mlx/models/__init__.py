"""A loaded model: its facts, its prompts, and the states that its layers write."""
