"""The probe: how far two engines or two recorded columns differ, and why.

`columns` has two columns of log-probs, and imports NumPy alone; `live` has engines and their operators.
"""
