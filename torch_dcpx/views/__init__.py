"""Shows what a checkpoint holds, and how two differ: in Python, in a notebook, in `dcpx`.

Ask here: what do `ls`, `inspect`, `diff` and `stats` compute? The commands print what these return.
"""
