"""Data of the study: labelled texts, translations, and tasks made of plain text."""
