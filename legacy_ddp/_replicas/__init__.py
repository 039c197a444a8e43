"""Do all ranks hold the same bits, and if not, who differs in what and since when?"""
