"""An HTTP server whose models share their conversations' caches.

Two processes: the front talks HTTP and never imports MLX; the worker owns all models, and one
thread of it does all the work of MLX. They send each other the plain data of :mod:`.messages`.
"""
