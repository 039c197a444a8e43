"""Traces of training runs: what a rank held, written while it trains, one file a rank, and read afterwards.

snapshot → measure, environment → records → line_format → write ⇒ file ⇒ read → run → summary

Imported by the recorder, the comparison of traces, the page and the command. Imports the replicas and the record.
"""
