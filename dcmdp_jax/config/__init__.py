"""Every setting, declared once. Flags, checks, the rule for resuming and docs/settings.md follow
from it.
"""
