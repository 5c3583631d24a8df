"""`save`, `async_save` and `load`: what DCP's plug-in points cannot do alone.

Ask here: what does each rank bring to a save or load, what is compared before a byte moves, what
can the caller of `async_save` ask its handle.
"""
