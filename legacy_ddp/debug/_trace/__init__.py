"""Traces of training runs: digests and norms of the state of every rank, one file per rank.

snapshot → measure, environment → records → line_format → write ⇒ file ⇒ read → run → summary

Imported by the recorder, the comparison of traces, the page and the command. Imports the replicas and the record.
"""
