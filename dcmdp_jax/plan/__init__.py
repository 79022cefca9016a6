"""Memory of a run at full size, by compilers of hardware that is not here."""
