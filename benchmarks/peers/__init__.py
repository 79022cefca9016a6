"""Other trainers doing the same work, each in a virtual environment and a process of its own."""
