"""Private process groups, and a call on these groups: sequence number, phases, waiting and small exchanges."""
