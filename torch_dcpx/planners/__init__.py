"""DcpxSavePlanner and DcpxLoadPlanner, and the plans that are kept.

Ask here: which rank writes what several hold, when is a plan used again.
"""
