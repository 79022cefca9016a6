"""Problems, prompts, episodes, and the packing of episodes into rows."""
