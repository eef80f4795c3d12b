"""The grouped head (Vennam et al., 2024)."""
