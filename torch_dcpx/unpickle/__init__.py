"""Pickles decoded without executing them.

Ask here: what may a pickle of a checkpoint name, what becomes of any other name, how much may a
small file make.
"""
