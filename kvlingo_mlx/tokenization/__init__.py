"""Texts as tokens: what two renderings share; records as samples. No MLX, no PyTorch."""
