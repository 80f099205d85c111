#!/bin/sh
# On a Mac, in MINUTES: tests, times, training; see machine_steps.py. It sets up an environment first.
cd "$(dirname "$0")/.." || exit
[ -n "$PYTHON" ] || { make .venv-test/ready && PYTHON=.venv-test/bin/python; } || exit
exec "$PYTHON" tools/machine_steps.py mac "$@"
