"""Tensors as memory: addresses, chunks, devices as torch shows them, values compared by hash.

Ask here: does this tensor have plain memory, which part of it has this rank, what is wrong with the
parts that a plan names, are two ranks' values equal, when may a tensor change again.
"""
