"""The closed form: from moments to maps. NumPy; the device and the CUDA path share it."""
