"""PyTorch, for a GPU: the models of a training, and lm-eval's tasks."""
