"""The parts of ``pretrain.py``."""
