"""Which models are there to put a vocabulary layer into?"""

from vqjax.models.transformer import Transformer

__all__ = ["Transformer"]
