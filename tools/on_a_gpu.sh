#!/bin/sh
# On a machine with an NVIDIA GPU, in MINUTES: tests, times, training; see machine_steps.py.
# PYTHON: one that has this package's requirements, mlx[cuda13] and the [cuda] extra.
exec "${PYTHON:-python3}" "$(dirname "$0")/machine_steps.py" gpu "$@"
