"""`save`, `async_save` and `load`, which do more than DCP's plug-in points allow.

Ask here: what does each rank bring to a save or load, what do ranks compare before a byte moves,
what can the caller of `async_save` ask its handle.
"""
