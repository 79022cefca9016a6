"""The method as pure functions of arrays: discrepancy, advantages, penalties, losses, lambda."""
