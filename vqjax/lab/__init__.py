"""The lab: configurations, datasets, training, conversion of runs, and reports.

It needs the extra packages of `pip install 'vqjax[lab]'`. The library never imports it.
"""
