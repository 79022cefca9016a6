"""Memory and communication of a run at full size, read from its compiled programs without the hardware."""
