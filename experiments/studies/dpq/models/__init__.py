"""Models of the study: a text classifier, a translator and BERT."""
