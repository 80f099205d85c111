"""Texts as tokens: aligned renderings, and records as samples; no MLX, no PyTorch."""
