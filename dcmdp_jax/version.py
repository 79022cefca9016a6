"""The version of the package, and where it is published."""

__version__ = "0.1.0"
REPOSITORY = ""
"""Address of the public repository, which model cards and the site link to; empty without one."""
