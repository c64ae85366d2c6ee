"""Experiment trackers that need other packages: `silodp run --log`. One module per tracker.

silodp finds them by the names in `silodp.runtime.callback.CALLBACKS`, and imports one when it is used.
"""
