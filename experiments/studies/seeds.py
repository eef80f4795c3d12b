"""(To be removed: import these names from `experiments.studies.page`.)"""

from experiments.studies.page import Spread, finished, seeds

__all__ = ["Spread", "finished", "seeds"]
