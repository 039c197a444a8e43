"""Traces of training runs: what a rank held, written while it trains, one file a rank, and read afterwards.

take → values, environment → records → lines → write ⇒ file ⇒ read → run → summary
"""
