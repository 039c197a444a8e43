"""Private process groups, and one call on them: sequence number, phases, waiting and small exchanges.

Imported by every room that communicates. Imports the watchdog, settings and errors.
"""
