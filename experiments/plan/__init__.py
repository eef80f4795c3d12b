"""Plans of training steps, compiled ahead of time."""
