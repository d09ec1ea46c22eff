"""The version of the distribution, of which both packages are."""

__version__ = "0.1.0"
