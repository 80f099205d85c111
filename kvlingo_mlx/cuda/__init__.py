"""A translation on an NVIDIA GPU, timed: PyTorch and Triton."""
