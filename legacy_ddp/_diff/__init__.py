"""Where do two runs part, or the ranks of one? Traces in, a finding out, told as text or JSON.

compare_runs, compare_ranks → pair, rank_words → sections → places → calls, surroundings → meaning → finding → tell
"""
