"""An HTTP server whose models share their conversations' caches.

HTTP runs in the main thread, and loads no MLX; the engine, which owns the models, in another one.
A small parent process holds the socket, and starts the server again if it crashes.
"""
