"""Files of models: tensors by name, configs and what families of models mean by them."""
