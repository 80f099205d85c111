"""A switch on a GPU with PyTorch: translated by a fused kernel, timed beside a re-prefill."""
