"""DC-GRPO in other trainers, in torch: TRL, verl, SkyRL, prime-rl and slime."""
