"""Adapters to frameworks, for what the hook cannot give them. Asks: where does a framework save and
load, and which of its classes puts that into our commit? Each module needs its framework.
"""
