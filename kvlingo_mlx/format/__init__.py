"""A translator's folder, and the facts of two models that it depends on. No MLX, no PyTorch."""
