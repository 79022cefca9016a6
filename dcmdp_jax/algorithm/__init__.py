"""The method as pure functions of arrays: discrepancy, advantages, penalties, corrections, losses,
dual update.
"""
