"""How the demo checkpoint is made: songs by a program, questions about them, and the training."""
