"""The version, in one place: the package, its wheel and its files read it here."""

__version__ = "0.1.0"
