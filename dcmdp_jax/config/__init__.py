"""Every setting, declared once; flags, checks, resuming and docs/settings.md follow."""
