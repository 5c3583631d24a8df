"""The hook: stock DCP's classes come out as ours wherever code makes them. Asks: what is replaced,
with which options, and how do child processes learn of it?
"""
