"""VQ-Logits (Shao et al.): heads with codes for tokens."""
