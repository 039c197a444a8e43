"""Private process groups, and a call on these groups: sequence number, phases, waiting and small exchanges.

Imported by all communicating rooms. Imports the watchdog, the buckets (shared memory), torch's interfaces and
errors.
"""
