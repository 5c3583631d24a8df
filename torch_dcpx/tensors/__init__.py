"""What a tensor says of its memory, and CUDA as torch shows it.

Ask here: does this tensor have plain memory, which part of it has this rank, what is wrong with the
parts that a plan names, are two ranks' values equal, when may a tensor change again.
"""
