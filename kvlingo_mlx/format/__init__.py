"""The format of translator folders, and the facts of models it relies on; no MLX, no PyTorch."""
