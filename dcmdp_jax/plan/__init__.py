"""What a run takes at full size, read from its compiled programs on a machine without the hardware."""
