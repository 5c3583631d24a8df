"""Directories, the names of the files in them, locks, paths.

Ask here: which names may a file of a checkpoint have, what stops a second save to a directory, what
does a relative path mean.
"""
