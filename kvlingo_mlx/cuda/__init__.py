"""PyTorch, for a GPU: the models of a training, lm-eval's tasks, and the timing of a switch."""
