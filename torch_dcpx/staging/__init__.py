"""Snapshots of a state, so that training goes on while they are saved.

Ask here: where do copies lie, when is their memory free again, how does a state reach another
process.
"""
