"""DC-GRPO in JAX: reinforcement learning of language models under a training-inference discrepancy constraint."""

import os

# transformers advises at import that PyTorch is missing; only its tokenizers are used here, and they need none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
