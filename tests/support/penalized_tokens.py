"""Two completions of three tokens, their penalized advantages and the multiplier after them, by
hand; needs torch.
"""

import torch

# p = 0.5, 0.4, 0.3; q = 0.4, 0.6, 0.3: deltas 0.1, 0.2, 0. The third is not sampled in the second
# completion.
P = torch.tensor([[0.5, 0.4, 0.3]] * 2).log()
Q = torch.tensor([[0.4, 0.6, 0.3]] * 2).log()
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
A = torch.tensor([1.0, -1.0])
# lambda = 0.5: A - 0.05, A - 0.1, A.
PENALIZED = torch.tensor([[0.95, 0.9, 1.0], [-1.05, -1.1, 0.0]])
# (0.1 + 0.2 + 0 + 0.1 + 0.2) / 5 = 0.12; lambda += 2 (0.12 - 0.02).
MOVED = 0.7
