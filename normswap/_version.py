"""The one place where the version stands; the packaging reads it from here."""

__version__ = "0.1.0"
