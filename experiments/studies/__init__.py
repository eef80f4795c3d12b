"""Studies of papers: a folder each, and what they share."""
