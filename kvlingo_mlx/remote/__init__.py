"""A source on another machine: what is asked of it, how its states come, and how they are checked.

The server's side is ``serving/prefill.py``. Both sides work out what a chunk holds from the same
:class:`~kvlingo_mlx.remote.order.Order`.
"""
