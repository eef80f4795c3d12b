"""The commands of `vqjax`, a module for each; `vqjax.cli` imports the one that is called."""
