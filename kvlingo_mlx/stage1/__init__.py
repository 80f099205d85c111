"""Stage 1, the closed form: from moments to maps; NumPy, shared by the MLX and the CUDA path."""
