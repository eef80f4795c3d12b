"""The lab: configurations, datasets, training, conversion of runs, and reports.

It needs the extra packages of `pip install '.[lab]'` in a checkout. The library never imports it.
"""
