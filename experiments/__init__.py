"""Commands, studies, benchmarks and plans."""
